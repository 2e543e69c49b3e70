"""A model of Hugging Face transformers answers, parallel over a mesh: two lines more than on one device.

    python examples/chat.py                             # four ranks inside this process
    torchrun --nproc-per-node 4 examples/chat.py        # real processes, the same file
    python examples/chat.py --path folder "a prompt"    # a model and its tokenizer from files, each rank its slices

Needs transformers. Without --path the model is tiny and its weights are random, so that it babbles; a character is a
token. What it says is compared with one device.
"""

import argparse
import copy
import os
import sys

import torch

import shardwise as sw

try:
    import transformers
except ImportError:
    sys.exit("this example needs transformers: pip install 'transformers>=5.17'")

say = print if os.environ.get("RANK", "0") == "0" else lambda *words: None


def tiny_model() -> transformers.PreTrainedModel:
    """A small Llama with random weights, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=128, num_key_value_heads=4, **sizes, **ends)
    return transformers.LlamaForCausalLM(config).eval()


def prompts_as_tokens(prompts: list[str]) -> dict[str, torch.Tensor]:
    """A character is a token; shorter prompts are padded on the left."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(each)) + [ord(c) % 128 for c in each] for each in prompts]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=["Tell me of tensors.", "Who?"])
    parser.add_argument("--path", help="a folder with a model and its tokenizer")
    parser.add_argument("--tokens", type=int, default=12)
    options = parser.parse_args()

    mesh = sw.init_device_mesh("cpu", (int(os.environ.get("WORLD_SIZE", "4")),), mesh_dim_names=("tp",))
    settings = {"max_new_tokens": options.tokens, "do_sample": True, "top_k": 20}
    if options.path:
        model = sw.hf.from_pretrained(options.path, mesh)
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.path, padding_side="left")
        inputs, plain = dict(tokenizer(options.prompts, return_tensors="pt", padding=True)), None
    else:
        plain = tiny_model()
        model = sw.hf.parallelize(copy.deepcopy(plain), mesh)
        inputs = prompts_as_tokens(options.prompts)

    torch.manual_seed(1)
    said = model.generate(**inputs, **settings).full_tensor()
    length = inputs["input_ids"].shape[1]
    for prompt, row in zip(options.prompts, said[:, length:], strict=True):
        if plain is None:
            say(f"{prompt} -> {tokenizer.decode(row, skip_special_tokens=True)}")
        else:
            say(f"{prompt} -> {row.tolist()}")
    say(f"q_proj of layer 0: {model.model.layers[0].self_attn.q_proj.weight.spec}" if plain is not None else "")
    if plain is not None:
        torch.manual_seed(1)
        say(f"as on one device: {torch.equal(plain.generate(**inputs, **settings), said)}")


if __name__ == "__main__":
    main()
