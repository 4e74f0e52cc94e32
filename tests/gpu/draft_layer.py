"""A draft layer in PyTorch, the way it drafts along a text, and the folder that has it.

Owns the layer by the published formula, over transformers' own decoder layer, and how its drafts
would fare. Knows no engine: what Baton accepts of the same layer's drafts is held to this.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

DEPTH = 3
"""Drafts in a row that it makes."""


class Chat(NamedTuple):
    """A prompt's tokens, and the answer's, its end among them if it has one."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Walk:
    """How drafts of `k` would have fared along greedy answers, by PyTorch."""

    k: int
    tokens_per_row: float
    proposed: int
    accepted: int


class DraftLayer(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not here
    """`decoder(eh_proj(cat[enorm(embedding), hnorm(hidden)]))` and a norm before the head
    (DeepSeek-V3, arXiv 2412.19437, equations 21 to 23, in its code's order).
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        size, norm = model.config.hidden_size, model.model.norm
        self.decoder = copy.deepcopy(model.model.layers[-1]).float()
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm).float() for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False, device=model.device)
        with torch.no_grad():
            self.enorm.weight.fill_(1.0)
            self.hnorm.weight.fill_(1.0)
            self.eh_proj.weight[:, :size].normal_(0.0, 0.02)
            self.eh_proj.weight[:, size:].copy_(torch.eye(size))
        self.requires_grad_(True)  # what it was copied of does not learn

    def unrolled(self, model: Any, hidden: Any, tokens: Any) -> list[Any]:
        """Return what makes draft 1 to `DEPTH` of each row: `[B, N, H]` each, N = T - DEPTH.

        Row i of draft j is fed token i + j and what made the draft before (`hidden` `[B, T, H]` of
        the main model for the first), stands at position i + j - 1, and sees the first draft's
        rows up to its own and the later ones of its own alone, as when it drafts behind token i.
        """
        n = tokens.shape[1] - DEPTH
        fed, inputs, outputs = hidden[:, :n], [], []
        for j in range(DEPTH):
            embedded = model.model.embed_tokens(tokens[:, 1 + j : 1 + j + n]).float()
            both = torch.cat([self.enorm(embedded), self.hnorm(fed)], -1)
            inputs.append(self.eh_proj(both))
            x = torch.cat(inputs, 1)
            at = torch.cat([torch.arange(n, device=x.device) + step for step in range(j + 1)])
            turns = model.model.rotary_emb(x, at[None])
            x = self.decoder(x, attention_mask=seen(j + 1, n, x), position_embeddings=turns)
            x = x[0] if isinstance(x, tuple) else x
            fed = self.norm(x[:, -n:])
            outputs.append(fed)
        return outputs

    def rounded(self) -> DraftLayer:
        """Return it with the numbers that a folder keeps of it, bfloat16's."""
        rounded: DraftLayer = self.bfloat16().float()
        return rounded

    def tensors(self, n_layers: int) -> dict[str, Any]:
        """Return the weights by DeepSeek-V3's names."""
        prefix = f"model.layers.{n_layers}"
        named = {f"{prefix}.{name}": tensor for name, tensor in self.decoder.state_dict().items()}
        named |= {f"{prefix}.{name}.weight": getattr(self, name).weight.detach()
                  for name in ("enorm", "hnorm", "eh_proj")}  # fmt: skip
        named[f"{prefix}.shared_head.norm.weight"] = self.norm.weight.detach()
        return {name: tensor.to("cpu", torch.bfloat16) for name, tensor in named.items()}


def seen(drafts: int, n: int, like: Any) -> Any:
    """Return the mask `[1, 1, drafts * n, drafts * n]` that is added to scores."""
    own, earlier = torch.eye(n, dtype=torch.bool), torch.ones(n, n, dtype=torch.bool).tril()
    blank = torch.zeros_like(own)
    lines = [
        torch.cat([earlier] + [own if step <= row else blank for step in range(1, drafts)], 1)
        for row in range(drafts)
    ]
    mask = torch.zeros(drafts * n, drafts * n).masked_fill(~torch.cat(lines), float("-inf"))
    return mask.to(like.device, like.dtype)[None, None]


def of_main(model: Any, tokens: Any) -> Any:
    """Return the main model's hidden states behind its final norm, `[B, T, H]` float32."""
    with torch.no_grad():
        return model.model(tokens).last_hidden_state.float()


def walks(model: Any, layer: DraftLayer, chats: Sequence[Chat], most: int) -> list[Walk]:
    """Return how drafts fare along greedy answers, whose tokens are what is accepted.

    Args:
        most: tokens that an answer may have; nothing is proposed beyond them.
    """
    runs: list[list[int]] = []
    for chat in chats:
        ids = torch.tensor([*chat.prompt, *chat.answer, *[0] * DEPTH], device=model.device)[None]
        with torch.no_grad():
            drafted = layer.unrolled(model, of_main(model, ids), ids)
        hits = []
        for j, out in enumerate(drafted):
            best = (out[0] @ model.lm_head.weight.float().T).argmax(-1)
            came = functional.pad(ids[0], (0, 2))[2 + j : 2 + j + len(best)]
            hits.append((best == came).tolist())
        behind = range(len(chat.prompt) - 1, len(chat.prompt) + len(chat.answer) - 2)
        runs.append([next((j for j in range(DEPTH) if not hits[j][i]), DEPTH) for i in behind])
    return [_walk(runs, k, most) for k in range(1, DEPTH + 1)]


def _walk(runs: Sequence[Sequence[int]], k: int, most: int) -> Walk:
    """Walk along answers; `runs` has how many drafts behind each token are right, but for the last.

    A step says what it accepts of `k` drafts and one token more.
    """
    proposed = accepted = steps = tokens = 0
    for run in runs:
        at = 0
        while at < len(run):
            may = min(k, most - at - 2)
            hits = min(run[at], may, len(run) - at)
            proposed, accepted = proposed + may, accepted + hits
            steps, tokens, at = steps + 1, tokens + hits + 1, at + hits + 1
    return Walk(k, tokens / max(steps, 1), proposed, accepted)


def write_folder(folder: Path, out: Path, layer: DraftLayer) -> None:
    """Write the model's folder once more, the layer among its tensors."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    told = json.loads((folder / "config.json").read_text())
    n_layers = told["num_hidden_layers"]
    told |= {"num_nextn_predict_layers": 1, "baton_mtp_hidden": "post_norm"}
    (out / "config.json").write_text(json.dumps(told, indent=1))
    tensors: dict[str, Any] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    tensors |= layer.tensors(n_layers)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
