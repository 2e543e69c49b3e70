"""What users do to models of transformers before and after they are made parallel, against the plain model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.models.architectures import missing, prepare

pytestmark = pytest.mark.skipif(missing("transformers") is not None, reason="needs transformers")


def plain_model(**sizes: Any) -> Any:
    prepare("transformers")
    transformers = pytest.importorskip("transformers")
    known: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 46, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(known | heads | sizes)))


def parallel(model: Any, ranks: int = 4) -> Any:
    return sw.hf.parallelize(model, sw.init_device_mesh("cpu", (ranks,)))


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, sw.DTensor) else value).detach()


def rows(highest: int = 97) -> torch.Tensor:
    return torch.randint(3, highest, (4, 10), generator=torch.Generator().manual_seed(5))


def step(model: Any, ids: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    output = model(input_ids=ids, labels=ids, **options)
    output.loss.backward()
    gradients = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": whole(output.loss), **gradients}


def check(
    got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_three_heads_97_tokens_and_46_features_on_any_number_of_ranks(ranks: int, tied: bool) -> None:
    wanted = step(plain_model(tie_word_embeddings=tied), rows())
    check(step(parallel(plain_model(tie_word_embeddings=tied), ranks), rows()), wanted)


def test_attentions_and_hidden_states() -> None:
    model, plain = parallel(plain_model()), plain_model()
    for each in (model, plain):
        each.set_attn_implementation("eager")
    found, wanted = (each(rows(), output_attentions=True, output_hidden_states=True) for each in (model, plain))
    for kind in ("attentions", "hidden_states"):
        assert len(found[kind]) == len(wanted[kind])
        for one, other in zip(found[kind], wanted[kind], strict=True):
            torch.testing.assert_close(whole(one), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_token_embeddings_that_are_resized(tied: bool) -> None:
    wide = plain_model(tie_word_embeddings=tied)
    wide.resize_token_embeddings(103, mean_resizing=False)
    values = wide.state_dict()
    wanted = step(wide, rows(103))
    before = plain_model(tie_word_embeddings=tied)
    before.resize_token_embeddings(103, mean_resizing=False)
    before.load_state_dict(values)
    check(step(parallel(before), rows(103)), wanted)


def test_evaluation_twice_and_bfloat16() -> None:
    model, plain = parallel(plain_model()), plain_model()
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(whole(model.eval()(rows()).logits), plain.eval()(rows()).logits)
        check(step(model.train(), rows()), step(plain.train(), rows()))
        for each in (model, plain):
            each.zero_grad()
    low = plain_model().bfloat16()
    check(step(parallel(plain_model().bfloat16()), rows()), step(low, rows()), rtol=0.05, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        check(step(model, rows()), step(plain, rows()), rtol=0.05, atol=0.02)


def ways() -> dict[str, Callable[[Any], Any]]:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def sharded(model: Any) -> Any:
        return sw.hf.shard_batch(sw.fully_shard(model, mesh["dp"]), mesh["dp"])

    return {
        "parallelize": lambda model: sw.hf.parallelize(model, mesh["tp"]),
        "fully_shard": sharded,
        "both": lambda model: sharded(sw.hf.parallelize(model, mesh["tp"])),
    }


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("way", ["parallelize", "fully_shard", "both"])
def test_a_captured_step_is_as_on_one_device(way: str, trains: bool) -> None:
    def results(model: Any, captured: bool) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(ids: torch.Tensor) -> Any:
            if not trains:
                with torch.no_grad():
                    return model(input_ids=ids).logits
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run: Any = sw.captured(step) if captured else step
        found = [whole(run(rows().roll(number, 0))).clone() for number in range(5)]
        assert not captured or run.programs
        return found

    wanted = results(plain_model(), captured=False)
    for found, value in zip(results(ways()[way](plain_model()), captured=True), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
