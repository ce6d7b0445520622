"""Top-k: the same results as torch to the last bit, with few scores sorted."""

import math
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from worker.engines.transformers.sample import topk

VOCAB = 20_000
MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as they come": lambda scores: scores,
    "rounded, so that many are equal": lambda scores: (scores * 4).round() / 4,
    "all equal": torch.zeros_like,
    "mostly forbidden": lambda scores: scores.masked_fill(torch.arange(VOCAB) % 997 != 5, -math.inf),
    "the highest at the end": lambda scores: scores + torch.arange(VOCAB) / 100,
    "one row forbidden": lambda scores: scores.index_fill(0, torch.tensor([1]), -math.inf),
    "one row of NaN": lambda scores: scores.index_fill(0, torch.tensor([1]), math.nan),
    "one NaN": lambda scores: scores.index_put((torch.tensor(2), torch.tensor(77)), torch.tensor(math.nan)),
}


def scores(made: str, rows: int = 4) -> torch.Tensor:
    return MADE[made](torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 3)


def same(mine: torch.Tensor, its: torch.Tensor) -> bool:
    return torch.equal(mine.nan_to_num(nan=1e9), its.nan_to_num(nan=1e9))


@pytest.mark.parametrize("made", MADE)
def test_the_highest_score_is_that_of_torch(made: str) -> None:
    values, tokens = topk.highest(scores(made))
    best = scores(made).max(dim=-1)
    assert same(values, best.values)
    assert torch.equal(tokens, best.indices)


@pytest.mark.parametrize("made", [made for made in MADE if "NaN" not in made])
@pytest.mark.parametrize("count", [1, 40, 256, VOCAB])
def test_the_highest_values_are_those_of_torch(made: str, count: int) -> None:
    assert same(topk.top(scores(made), count), scores(made).topk(count, dim=-1).values)


@pytest.mark.parametrize("made", ["one row of NaN", "one NaN"])
def test_a_row_that_is_broken_spoils_no_other(made: str) -> None:
    whole = [row for row in range(4) if not scores(made)[row].isnan().any()]
    assert same(topk.top(scores(made), 40)[whole], scores(made)[whole].topk(40, dim=-1).values)


@pytest.mark.parametrize("made", [made for made in MADE if "row" not in made and "NaN" not in made])
def test_a_draw_among_few_is_the_one_among_all(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = scores(made, rows=64)
    logits -= logits.amax(-1, keepdim=True)
    floor = logits.topk(50, dim=-1).values[:, -1]
    uniforms = torch.linspace(0, 1, 65)[:-1]
    mine = topk.draw(logits.clone(), floor, uniforms)
    monkeypatch.setattr(topk, "_is_on_cpu", lambda scores: False)
    assert torch.equal(mine, topk.draw(logits.clone(), floor, uniforms))


def test_where_many_stay_indices_are_not_made() -> None:
    """They would take more memory than the scores, which estimates do not include."""
    logits = scores("as they come")
    assert topk._candidates(logits, logits.median(-1).values) is None
    most = logits[0].median().expand(64)
    assert topk._candidates(torch.cat((logits[:1], logits[1:2].expand(63, -1) - 99.0)), most) is None, (
        "of one row alone"
    )
    found = topk._candidates(logits, logits.topk(100, dim=-1).values[:, -1])
    assert found is not None
    assert found.tokens.shape == (4, 100)


def test_without_content_shapes_are_all_that_is_found() -> None:
    with FakeTensorMode():
        fake = torch.empty(4, VOCAB)
        assert topk.highest(fake)[1].shape == (4,)
        assert topk.top(fake, 40).shape == (4, 40)
        assert topk.draw(fake, torch.empty(4), torch.empty(4)).shape == (4,)
