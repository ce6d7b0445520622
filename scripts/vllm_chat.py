"""vLLM as a contestant of `scripts/bench_engine --chat --vllm PYTHON`, run by an interpreter that has vLLM.

    PYTHON scripts/vllm_chat.py SNAPSHOT TOKENS AT_ONCE CONTEXT ANSWER DTYPE

Each line on stdin is a JSON array of prompts as token ids. The line on stdout for it is an array of `[seconds until the
first token, tokens of the answer, prompt tokens that were not computed again]`.
"""

import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs on stdout
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # of the other environment

    snapshot, *numbers, dtype = sys.argv[1:]
    tokens, at_once, context, answer = map(int, numbers)
    block = 32
    engine = LLM(
        model=snapshot,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_num_seqs=at_once,
        max_model_len=context,
        block_size=block,
        num_gpu_blocks_override=tokens // block,
        enable_prefix_caching=True,
        enforce_eager=True,  # compiling takes minutes, and only first tokens are measured
        disable_log_stats=False,  # they have the time of the first token
    )
    sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(line)]
        found = [
            (done.metrics.first_token_latency, list(done.outputs[0].token_ids), done.num_cached_tokens)
            for done in engine.generate(prompts, sampling, use_tqdm=False)
        ]
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
