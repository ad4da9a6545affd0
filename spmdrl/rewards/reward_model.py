"""Rewards by a model: a sequence classifier with one output reads what was said."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from spmdrl.config import ConfigError, DataConfig, RewardModelConfig, TrainConfig
from spmdrl.data.chat import Encoder, encode_said
from spmdrl.data.images import BatchImages, ImageProcessor
from spmdrl.data.packing import to_batch
from spmdrl.data.pictures import MARK, parts_of, shown_in
from spmdrl.data.preferences import Conversation
from spmdrl.data.reply_images import pictures_in, without_data
from spmdrl.data.table_files import BadRow
from spmdrl.data.visuals import Visual
from spmdrl.engines.base import TrainEngine
from spmdrl.engines.fsdp.classifier import SUFFIX, check_classifier, is_classifier
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.types import Message, Sample

NO_LIMIT = 2**24  # tokens; what is too long for the model makes the sample invalid


class RewardModel:
    """The reward model, on each rank that scores. The model reads prompt and answer in its own chat
    template and tokens; a prompt that is a plain string, with the last turn right behind it. Where
    it has a tower for images it sees those of prompts and replies, by its own image processor;
    another one reads "<image>" where one stands.
    """

    def __init__(self, config: RewardModelConfig, engine: TrainEngine, tokenizer: Any) -> None:
        self.engine = engine
        asked = DataConfig("", chat_template_kwargs=config.chat_template_kwargs)
        whole = load_hf_config(config.model)
        self.vision = ImageProcessor.load(config.model, whole, asked)
        written = None if self.vision is None else self.vision.family.text
        hf = whole.get_text_config()
        self.encoder = Encoder(tokenizer, asked, NO_LIMIT, hf.vocab_size, image_text=written)
        self.append_eos = appends_eos(config.model)
        self.longest = getattr(hf, "max_position_embeddings", NO_LIMIT)

    def score(self, samples: list[Sample]) -> None:
        """Sets model_score, or invalid where the model cannot read a sample.

        Collective over the engine's ranks; each brings its own samples.
        """
        read = [self.encode(sample) for sample in samples]
        self.engine.onload(weights_only=True)
        batch = to_batch([each.token_ids for each in read])
        images = None
        if self.vision is not None:
            batch.prompts = torch.arange(len(read))
            images = BatchImages(self.vision, read.__getitem__)
        scores = self.engine.values(batch, images)[batch.loss_mask > 0]
        self.engine.offload()
        for sample, score in zip(samples, scores.tolist(), strict=True):
            sample.model_score = score

    def encode(self, sample: Sample) -> Conversation:
        """Its tokens and images; of an invalid sample any."""
        is_text = sample.prompt.chat is None
        pictures: tuple[Visual, ...] = ()
        try:
            if self.vision is None:
                chat = [without_images(message) for message in sample.chat]
            else:
                chat, pictures = with_pictures(sample)
            said = sample.prompt.text + sample.response if is_text else chat
            ids = encode_said(said, self.encoder, self.append_eos).ids
            if self.vision is not None and pictures:
                ids = self.vision.placed(ids, pictures)
            if len(ids) >= self.longest:  # one more stands behind them
                raise BadRow(f"{len(ids)} tokens, more than its {self.longest} positions less one")
        except BadRow as error:
            sample.invalid = sample.invalid or f"the reward model cannot read it: {error}"
            return Conversation([0], ())
        return Conversation(ids, pictures)


def with_pictures(sample: Sample) -> tuple[list[Message], tuple[Visual, ...]]:
    """The chat with a part {"type": "image"} for each image, and the images. Raises BadRow."""
    prompt, asked = sample.prompt, sample.prompt.messages
    if prompt.images or any(isinstance(turn["content"], list) for turn in asked):
        asked = shown_in(asked, prompt.images)
    said = [{**turn, "content": without_data(turn["content"])} for turn in sample.messages]
    return [*asked, *said], (*prompt.images, *pictures_in(sample.messages))


def without_images(message: Message) -> Message:
    """The message with a text as its content, in which each image is "<image>": reward models see
    none. Raises BadRow.
    """
    content = without_data(message["content"])
    if not isinstance(content, list):
        return message
    parts = (MARK if part["type"] == "image" else part["text"] for part in parts_of(content))
    return {**message, "content": "".join(parts)}


def appends_eos(model: str) -> bool:
    """Whether a reward model wants EOS behind strings: what it was trained with, by its
    config.json, where spmdrl.reward_model wrote it."""
    return bool(getattr(load_hf_config(model), "append_eos", False))


def train_config(config: RewardModelConfig) -> TrainConfig:
    """Returns the config that the engine is built with."""
    return TrainConfig(
        model=config.model, dtype=config.dtype, fsdp=config.fsdp,
        micro_batch_tokens=config.micro_batch_tokens, offload_params=config.offload_params,
    )  # fmt: skip


def check_reward_model(config: RewardModelConfig) -> PreTrainedConfig:
    """Raises ConfigError for a model that is no sequence classifier with one output."""
    hf = load_hf_config(config.model)
    if not is_classifier(hf):
        kind = ", ".join(hf.architectures or ()) or "of no known kind"
        raise ConfigError(
            f"reward_model.model={config.model!r} is {kind}; expected ...{SUFFIX}, a model with a "
            "score, such as spmdrl.reward_model trains. A model that judges in words is asked by a "
            "reward function (async def)"
        )
    check_classifier("reward_model.model", config.model, hf)
    return hf
