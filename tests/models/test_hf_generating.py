"""`generate` of parallel models in the ways that users call it, against one device."""

from typing import Any

import pytest
import torch

import shardwise as sw
from tests.models.architectures import missing
from tests.models.hf_programs import generation_differences
from tests.models.hf_tiny_models import carrier_of, tiny_model

pytestmark = pytest.mark.skipif(missing("transformers") is not None, reason="needs transformers")
ARCHITECTURES = ["Llama", "Gemma3Text", "Qwen3Moe"]
PROMPTS = {
    "several sequences of a prompt": {"do_sample": True, "num_return_sequences": 3},
    "beams and several sequences": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    "processors of logits": {
        "do_sample": False,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[7], [9, 11]],
        "min_new_tokens": 3,
    },
    "top p and min p": {"do_sample": True, "top_p": 0.8, "min_p": 0.05, "temperature": 1.2},
    "a dynamic cache that is off": {"do_sample": False, "use_cache": False},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_those_of_one_device(name: str) -> None:
    assert not list(generation_differences(carrier_of(name), PROMPTS))


def pair(name: str) -> tuple[Any, Any]:
    carrier = carrier_of(name)
    parallel: Any = sw.hf.parallelize(tiny_model(carrier).model.eval(), sw.init_device_mesh("cpu", (4,)))
    return tiny_model(carrier).model.eval(), parallel


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, sw.DTensor) else value).detach()


def test_rows_that_end_early_a_streamer_and_scores() -> None:
    transformers = pytest.importorskip("transformers")

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def put(self, value: Any) -> None:
            self.seen.append(whole(value).tolist())

        def end(self) -> None:
            self.seen.append("end")

    torch.manual_seed(4)
    ids = torch.randint(4, 60, (3, 5))
    plain, parallel = pair("Llama")
    first = plain.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    ends = int(first[1, 6])  # greedy decoding gives this token in some rows, and not in all
    texts = [
        whole(each.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=ends))
        for each in (plain, parallel)
    ]
    assert (texts[0] == 0).any()
    assert torch.equal(texts[1], texts[0])
    streamers = [Streamer(), Streamer()]
    results = [
        each.generate(
            ids[:1],
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
            streamer=streamer,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        for each, streamer in zip((plain, parallel), streamers, strict=True)
    ]
    assert streamers[0].seen == streamers[1].seen
    for kind in ("scores", "logits"):
        for one, other in zip(results[0][kind], results[1][kind], strict=True):
            torch.testing.assert_close(whole(other), one, rtol=1e-4, atol=1e-5)


def test_assisted_generation() -> None:
    ids = torch.randint(4, 60, (1, 5), generator=torch.Generator().manual_seed(4))
    plain, parallel = pair("Llama")
    helper: Any = tiny_model(carrier_of("Llama")).model.eval()
    wanted = plain.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, assistant_model=helper)
    found = parallel.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, assistant_model=helper)
    assert torch.equal(whole(found), wanted)
    looked_up = [
        whole(each.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=2))
        for each in (plain, parallel)
    ]
    assert torch.equal(looked_up[1], looked_up[0])
