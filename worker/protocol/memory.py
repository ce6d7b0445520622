"""Byte counts and limits that both sides use: the router for estimates before a worker exists, the worker for its exact
estimate and in the engine. Sizes are bytes unless a name states another unit."""

from collections.abc import Mapping
from functools import cache

MIB = 1 << 20

# Longest path of a unix socket: `sun_path` has 108 bytes, one of them for the end (unix(7)).
SOCKET_PATH_BYTES = 107

# Process overhead.

# Device context and libraries of one process on an accelerator, until a worker has measured them. Measured: 685 MiB
# after a matrix product, 748 after all kernels of a worker (H100 and H200, driver 580, torch 2.11 with CUDA 13).
DEVICE_PROCESS_BYTES = 768 * MIB

# Main memory of a process that uses accelerators (imports with CUDA's libraries), until a worker has measured it.
# Measured: 1,465 to 1,530 MiB beside the staging buffers (H100 and H200).
DEVICE_PROCESS_HOST_BYTES = 1536 * MIB

# Main memory that the first steps on an accelerator add to a process whose device is open: code of kernels, libraries,
# and Triton's compiler. Measured: 650 MiB in an executed worker, 340 in a forked one, 510 there while kernels were
# compiled (H100 and H200).
DEVICE_LIBRARIES_HOST_BYTES = 640 * MIB

# Main memory of a fork server, until it has measured itself. Measured: 397 MiB, of which 291 are the data of the
# imports and the rest mapped libraries (torch 2.13 for the CPU, transformers 5.23, Python 3.11).
FORK_SERVER_BYTES = 400 * MIB

# Code of the fork server's libraries that only workers use. It is charged to the fork server, once. Measured: 16 to 22
# MiB, grammars included.
LIBRARY_CODE_BYTES = 32 * MIB

# Main memory of grammars, independent of the vocabulary: 8 MiB of library, and a cache of compiled grammars. 32 usual
# ones take 8 MiB, the largest that the cache keeps 24 MiB. Measured with llguidance 1.9.
GRAMMAR_BYTES = 32 * MIB

# Main memory for each entry of the vocabulary after the first grammar is compiled. Measured: 140 MB for 151,000.
GRAMMAR_ENTRY_BYTES = 960

# Characters of a grammar, to bound the work of one request.
MAX_GRAMMAR_LENGTH = 1 << 18

# Stack of a thread that compiles grammars. llguidance 1.9 descends into each rule or schema that another one refers to,
# and takes up to 16 KiB of stack for it. An overflow would end the process. By the stack that shorter chains took,
# MAX_GRAMMAR_LENGTH characters may need 230 MiB.
COMPILER_STACK_BYTES = 512 * MIB

# Main memory that the first large steps add on a CPU: code of kernels and buffers of matrix products. Measured: 10 to
# 20 MiB.
FIRST_STEPS_BYTES = 20 * MIB

# Code that oneDNN compiles for one number of rows and one shape of weights. Measured: 0.4 to 0.7 MiB (oneDNN 3.12).
KERNEL_CODE_BYTES = 600 << 10

# Limit of oneDNN's cache of compiled kernels, set by worker/program/main.py.
KERNEL_CODES = 64

# Ratio of resident bytes to live bytes on the CPU: glibc keeps freed blocks below 32 MiB for the next step, and the
# blocks of one step do not fit those of another. Fitted on Llama, Qwen3 and GPT-2 shapes of 0.5 to 200 MB: 1.5 to 2.3
# where layers dominate, less where large logits do.
HEAP_FACTOR = 2

# Workspaces of CUDA's libraries on one accelerator, for three users: the loading thread, the stream that records graphs
# and the computing thread. Each has 32 MiB for cuBLAS on Hopper (cuBLAS documentation, CUBLAS_WORKSPACE_CONFIG; less on
# older cards) and 1 MiB for cuBLASLt. Steps, graphs and workspaces together took 241 to 405 MiB where 299 to 696 were
# estimated with the share below (five families, H100, prefill-chunk 2,048).
CUBLAS_WORKSPACE_BYTES = 3 * 33 * MIB

# Fragmentation of torch's allocator on an accelerator, as a share of the live bytes. A guess. In the measurement above,
# two of the five families would have taken 11 and 12 MiB more than estimated without it.
UNUSABLE_SHARE = 0.25

# NCCL's channels on each device of a tensor-parallel model, outside torch's allocator. A guess.
NCCL_BYTES = 256 * MIB

# Buffers and threads of Gloo in each tensor-parallel rank on the CPU. A guess above the observed values.
GLOO_BYTES = 8 * MIB

# Loading of weights.

# Pinned main memory through which weights are copied to an accelerator.
STAGING_BUFFERS, STAGING_BUFFER_BYTES = 16, 16 * MIB
STAGING_BYTES = STAGING_BUFFERS * STAGING_BUFFER_BYTES

# Part of a matrix that is reordered at once for the CPU. It exists twice meanwhile.
SLICE_BYTES = 64 * MIB

# Smallest float32 matrix that is reordered for the CPU. In bfloat16 every matrix is.
REORDERED_FROM_BYTES = 1 * MIB

# Bytes for each element of a 4-bit matrix during its conversion to the order of the CPU's kernels. Measured with
# bitsandbytes 0.50; gptqmodel 7.6 needs less.
QUANTIZING_BYTES = 7

# Bytes for each element of a quantized matrix that a step dequantizes, including the result; an upper limit. Measured
# with gptqmodel 7.6: 7.0 to 7.5 with 4 bits, 3.5 to 5.0 with 8.
DEQUANTIZED_ELEMENT_BYTES = 8

# KV cache.

BLOCK_TOKENS = 16

# Limits of the elements of a head that share a scale in an int8 or int4 cache.
_MOST_GROUPED, _LEAST_GROUPED = 32, 8


@cache  # each layer reads it several times in each step
def kv_group_size(head_dim: int) -> int:
    """Return the elements of a head that share a scale in an int8 or int4 cache: the largest divisor of `head_dim`
    within the limits, else the whole head."""
    sizes = range(min(_MOST_GROUPED, head_dim), _LEAST_GROUPED - 1, -1)
    return next((size for size in sizes if head_dim % size == 0), head_dim)


# Keys and values of an int8 or int4 cache that a step dequantizes at once, unless one row alone needs more. On the CPU
# this many stay in the processor's cache until they are read. On an accelerator each call costs more than the memory.
DEQUANTIZED_KV_BYTES: Mapping[str, int] = {"cpu": 4 * MIB, "cuda": 128 * MIB}

# Steps.

# Maximum number of prompt positions whose logits one step computes.
PROMPT_LOGITS = 16

# Bytes for each entry of a row of logits while its token is drawn: the logits, in the model's type and in float32, and
# the sort for top-p, if every row asks for it on a flat distribution. Traced: 52
# (worker/engines/transformers/sample/sampler.py).
DRAW_BYTES = 64

# Maximum number of drafted tokens in one step (speculative decoding), over all sequences. Each has logits.
DRAFT_LOGITS = 64

# Workspace of each thread in torch's attention on the CPU. Measured with torch 2.13.
ATTENTION_TILE_BYTES = 2 * MIB

# Joint attention of short decoding rows on the CPU: the number of scores that are computed at once, over all rows and
# heads.
SPREAD_SCORES = 1 << 18

# Float32 copies of bfloat16 keys in that computation: small enough for the processor's cache.
WIDENED_BYTES = 8 * MIB

# Keys and values of one layer that a CUDA graph gathers, as an upper limit. Larger steps take so long that the launch
# of kernels does not matter, and are not recorded.
GATHERED_BYTES = 256 * MIB

# One CUDA graph, beside its working memory. Measured: 1.2 MiB with 1,500 kernels, 4.9 with the kernels that a further
# batch size loads (H100 and H200, 32 layers).
GRAPH_BYTES = 4 * MIB

# Images.

# Main memory for one image, from its file to the model's input. Measured: 224 to 233 MiB with the processors of CLIP
# and Idefics3. One image is opened at a time.
OPENING_BYTES = 256 * MIB

# Limit of prepared images over all requests. A single request may exceed it.
HELD_BYTES = 128 * MIB
