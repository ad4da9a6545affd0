"""Losses of preferences: which of two answers is the better one, and by how much."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from spmdrl.segments import segment_expand
from spmdrl.types import Batch


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margins: Tensor, center_coef: float = 0.0
) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2 of each pair.

    chosen, rejected: rewards; all are (num_pairs,). The first term is eq. 1 of Ouyang et al. 2022
    (arXiv 2203.02155), its margin that of Llama 2 (Touvron et al. 2023, arXiv 2307.09288, section
    3.2.2); the second keeps rewards around 0 (Eisenstein et al. 2023, arXiv 2312.09244).
    """
    losses = -logsigmoid(chosen - rejected - margins)
    if center_coef:
        losses = losses + center_coef * (chosen + rejected).square()
    return losses


def pair_loss(
    rewards: Tensor, entropy: Tensor, mb: Batch, center_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The seam of engines/base.py for pairs (PreferenceDataset.batch): a mean over them."""
    assert mb.loss_weights is not None
    found = pair_terms(rewards, mb, center_coef)
    loss = (found.pop("loss") * mb.loss_weights[mb.loss_mask > 0]).sum()
    return loss, {name: values.detach().sum() for name, values in found.items()}


def pair_terms(rewards: Tensor, mb: Batch, center_coef: float) -> dict[str, Tensor]:
    """Returns metrics of each pair at both of its unmasked tokens, one of each sequence: a mean
    over tokens is then one over pairs. rewards: (num_tokens,). Returns (2 * num_pairs,) float32
    each.
    """
    unmasked = mb.loss_mask > 0
    chosen, rejected = rewards[unmasked].view(-1, 2).unbind(1)
    margins = segment_expand(mb.rewards, mb.seq_lens)[unmasked].view(-1, 2)[:, 0].float()
    of_pairs = {
        "loss": bradley_terry(chosen, rejected, margins, center_coef),
        "accuracy": (chosen > rejected).float(),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    return {name: values.repeat_interleave(2) for name, values in of_pairs.items()}
