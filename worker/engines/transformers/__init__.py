"""The engine on PyTorch and transformers.

`engine` implements `worker.interface.Engine`. `preparation`, `load_generator` and `load_encoder` build it. Below them:

    loop/       the step loop, its work (generation or encoding) and the requests
    run/        runners: one forward of the model for a batch
    load/       weights from disk to devices
    attention/  attention over the KV cache
    sample/     from logits to tokens
    schedule/   which sequence computes what in the next step; PURE
    device/     memory caps, drivers, process groups

Import order: modules here > loop > run > load > attention, sample > schedule, device.
"""
