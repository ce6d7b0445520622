"""Byte counts that router and worker share. The router reckons with them before a worker exists, the worker's exact
estimate and its engine use the same numbers. Standard library only; sizes in bytes unless a name says otherwise.
"""

from collections.abc import Mapping

MIB = 1 << 20

# The process itself.

DEVICE_PROCESS_BYTES = 768 * MIB
"""Device context and libraries of one process on an accelerator, until a worker has measured them. A guess: published
figures are 100 to 600 MiB by card and driver, and each thread's handles are added to that."""

DEVICE_PROCESS_HOST_BYTES = 1536 * MIB
"""Main memory of a process on accelerators, until a worker has measured it: imports with CUDA's libraries. A guess."""

GRAMMAR_BYTES = 32 * MIB
"""Main memory for grammars, whatever the vocabulary: 8 MiB of library, and the 32 compiled grammars that stay, of less
than a mebibyte each. Measured with llguidance 1.9."""

GRAMMAR_ENTRY_BYTES = 960
"""Main memory for each entry of the vocabulary once the first grammar is compiled. Measured: 140 MB for 151,000."""

FIRST_STEPS_BYTES = 20 * MIB
"""Main memory that the first steps of real size bring in on a CPU: code of kernels, buffers of matrix products.
Measured: 10 to 20 MiB."""

KERNEL_CODE_BYTES = 600 << 10
"""Code that oneDNN compiles for one number of rows and one shape of weights. Measured: 0.4 to 0.7 MiB (oneDNN 3.12)."""

KERNEL_CODES = 64
"""Compiled kernels that a worker keeps at most; worker/program/main.py sets oneDNN's cache to it."""

HEAP_FACTOR = 2
"""On the CPU, resident bytes by bytes alive at once: glibc keeps freed blocks below 32 MiB for the next step, and the
blocks of one step do not fit those of another. Fitted on Llama, Qwen3 and GPT-2 shapes of 0.5 to 200 MB: 1.5 to 2.3
times the live bytes where layers decide, less where large logits do."""

CUBLAS_WORKSPACE_BYTES = 3 * 33 * MIB
"""Workspaces of CUDA's libraries on one accelerator: for the thread that loads, for the stream that records graphs and
for the thread that computes. Each has one of 32 MiB on Hopper (cuBLAS documentation, CUBLAS_WORKSPACE_CONFIG; less on
older cards) and one of a mebibyte for cuBLASLt."""

UNUSABLE_SHARE = 0.25
"""Share of the live bytes on an accelerator that torch's allocator holds beside them in pieces that do not fit. A guess
until it is measured on a card."""

NCCL_BYTES = 256 * MIB
"""Channels of NCCL on each device of a tensor-parallel model. torch's allocator does not see them. A guess."""

GLOO_BYTES = 8 * MIB
"""Main memory of each tensor-parallel rank on the CPU: buffers and threads of Gloo. A guess above what was seen."""

# Weights on their way.

STAGING_BUFFERS, STAGING_BUFFER_BYTES = 16, 16 * MIB
STAGING_BYTES = STAGING_BUFFERS * STAGING_BUFFER_BYTES
"""Pinned main memory through which weights go to an accelerator."""

SLICE_BYTES = 64 * MIB
"""Part of a matrix that is reordered at once for the CPU; it is there twice meanwhile."""

REORDERED_FROM_BYTES = 1 * MIB
"""Smallest float32 matrix that is reordered on the CPU; in bfloat16 all of them are."""

PACKING_BYTES = 7
"""For each element of a matrix of 4 bits, while it is put into the order of the CPU's kernels. Measured with
bitsandbytes 0.50; gptqmodel 7.6 takes less."""

UNPACKED_ELEMENT_BYTES = 8
"""For each element of a packed matrix that a step unpacks, the result included, at most. Measured with gptqmodel 7.6:
7.0 to 7.5 with 4 bits, 3.5 to 5.0 with 8."""

# Keys and values.

BLOCK_TOKENS = 16
"""Tokens of one block of the pool."""

MOST_GROUPED, LEAST_GROUPED = 32, 8
"""Elements of a head that share a scale in an int8 or int4 cache: as many, up to the first, as divide a head; if that
would be fewer than the second, the whole head is one group."""

UNPACKED_BYTES: Mapping[str, int] = {"cpu": 4 * MIB, "cuda": 128 * MIB}
"""Keys and values of an int8 or int4 cache that a step has unpacked at once, if one row alone does not need more. On
the CPU so many stay in its caches until they are read; on an accelerator each call costs more than the memory."""

# Steps.

PROMPT_LOGITS = 16
"""Prompt positions whose logits one step computes at most."""

ATTENTION_TILE_BYTES = 2 * MIB
"""Workspace of each thread in torch's attention on the CPU. Measured with torch 2.13."""

SPREAD_SCORES, SPREAD_TENSORS = 1 << 18, 4
"""On the CPU short decoding rows attend together: scores that are computed at once, of all rows and heads, and tensors
of that size, of 4 bytes an element, which are alive with them."""

WIDENED_BYTES = 8 * MIB
"""Float32 copies of bfloat16 keys in that computation: few enough to stay in the processor's cache."""

GATHERED_BYTES = 256 * MIB
"""One layer's keys and values that a recorded step gathers at most. Larger steps take so long that starting kernels
does not matter, and are not recorded."""

GRAPH_BYTES = 4 * MIB
"""One recorded CUDA graph, beside what it computes in. A guess: not measured on any card yet."""

# Images.

OPENING_BYTES = 256 * MIB
"""Main memory for one image, from its file to the model's input. Measured: 224 to 233 MiB on CLIP's and Idefics3's
processors. One image is opened at a time."""

HELD_BYTES = 128 * MIB
"""Prepared images that all requests hold together at most; a single request may hold more."""
