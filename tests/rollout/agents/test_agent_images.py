"""Images in agents' messages: as tokens, in both rollout engines, in the trainer and in files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import png, save_qwen_vl
from transformers import AutoTokenizer
from vision_checks import logprobs_packed, vision_of

sys.path.insert(0, str(Path(__file__).parent))
from image_agent import image, shows

from spmdrl.config import AgentConfig, ConfigError, DataConfig, PpoConfig, RolloutConfig
from spmdrl.data.image_limits import ImageLimits
from spmdrl.data.images import BatchImages
from spmdrl.data.packing import pack_samples
from spmdrl.data.pictures import with_parts, with_pictures
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.model import build_model
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.rollout.agents.pool import AgentPool, AgentTask
from spmdrl.rollout.agents.samples import from_json, to_json
from spmdrl.rollout.base import Request, SamplingParams
from spmdrl.rollout.engine_calls import EngineCall, EngineCalls
from spmdrl.rollout.hf.engine import HfEngine
from spmdrl.rollout.request_images import images_of_request
from spmdrl.rollout.sampling import questions_of, sample_questions, training_params
from spmdrl.rollout.scheduler import Scheduler
from spmdrl.rollout.vllm.engine import VllmEngine
from spmdrl.training.checks.agents import check_agent_data
from spmdrl.training.checks.turns import check_reply_images
from spmdrl.training.logs.metrics import with_image_files
from spmdrl.training.run_images import no_images
from spmdrl.types import Picture, PlacedImage, Prompt

ENGINES: dict[str, Any] = {"vllm": VllmEngine, "hf": HfEngine}


CONFIG = PpoConfig(
    model="-", data=DataConfig(train="-", max_prompt_tokens=200), reward="agent", agent=shows,
    rollout=RolloutConfig(n=1, max_tokens=50, dtype="float32", kv_cache_mib=64, max_num_seqs=8),
    agents=AgentConfig(timeout_s=100, max_images=3, max_image_tokens=7),
)  # fmt: skip


PROBLEMS = (
    "is not fetched from elsewhere", "has 10 tokens, more than agents.max_image_tokens=7",
    "4 images, but a sample may be shown agents.max_images=3", "is of no format that Pillow reads",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_qwen_vl(tmp_path_factory.mktemp("models") / "model"))


@pytest.mark.engine
@pytest.mark.parametrize("name", [pytest.param("vllm", marks=pytest.mark.vllm), "hf"])
def test_images_of_agents_are_sampled_and_trained_on_as_one_conversation(
    model: str, topology: Topology, tmp_path: Path, name: str
) -> None:
    """The trainer computes the log-probabilities of the engine, so each token was seen behind the
    same images at the same places.
    """
    vision, tokenizer = vision_of(model), AutoTokenizer.from_pretrained(model)
    chat = with_parts([{"role": "user", "content": "<image>How many?"}], 1)
    given = Picture(png(0, 16, 8))
    prompts = [
        (i, Prompt(i, [5], "d", "t", "p", chat=chat, images=(given,))) for i in range(3)
    ]  # fmt: skip
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, engine=name))
    looks = ImageLimits(vision, 1, 2, (16, 8)).with_replies(3, 7, "agents")
    engine = ENGINES[name](model, config.rollout, 250, topology, looks=looks)
    pool = AgentPool(config, tokenizer, 0, 1, "key", len(tokenizer), vision)
    try:
        samples, _ = sample_questions(
            Scheduler(engine, topology), questions_of(prompts, 1, run_seed=0, step=1),
            training_params(config.rollout), tokenizer=tokenizer, by_agents=True, agents=pool,
        )  # fmt: skip
    finally:
        pool.close()
        engine.shutdown()
    rows = []
    for sample in samples:
        assert sample.invalid is None, sample.invalid
        # of equal tokens, and of other images: neither is the other's beginning
        counts = sorted(len(row.placed_images) for row in sample.rows)
        assert counts[-5:] == [1, 1, 1, 1, 2], counts
        assert sample.rows[0].num_turns == 2 and sample.rows[0].placed_images[0].picture == given
        for problem, words in zip(sample.agent_output["problems"], PROBLEMS, strict=True):
            assert words in problem, problem
        again = from_json(to_json(sample), sample.prompt, sample.group, sample.index)
        assert [r.placed_images for r in again.rows] == [r.placed_images for r in sample.rows]
        rows += sample.rows
    batch = pack_samples(rows)
    images = BatchImages(vision, no_images)
    images.mark(batch, rows)
    with torch.no_grad():
        got = logprobs_packed(build_model(model, full=True), images, batch)
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[batch.cu_seqlens[:-1]] = True
    mask = (batch.loss_mask > 0)[~first]
    want = batch.rollout_logprobs[~first]
    torch.testing.assert_close(got[mask], want[mask], rtol=1e-4, atol=1e-5)
    assert int(mask.sum()) > 60

    saved = with_image_files({"messages": [], "rows": [r.messages for r in samples[0].rows]},
                             tmp_path)  # fmt: skip
    text = json.dumps(saved)
    assert "base64" not in text and text.count("images/") == 1 == len(list(tmp_path.glob("*/*")))


def test_an_image_token_of_the_policy_moves_no_image(model: str) -> None:
    """Where images begin is told and not looked for, also on its way to an engine's other ranks."""
    vision, shown = vision_of(model), Picture(png(0, 16, 8))
    ids = [5, vision.token_id, 7, *vision.layout(shown), 6]
    request = Request(ids, 1, placed_images=[PlacedImage(3, shown)], adapter=2)
    call = EngineCall(request, SamplingParams(stop=("x",)))
    sent = EngineCalls.from_bytes(EngineCalls({4: call}).to_bytes()).begun[4]
    assert sent.request.placed_images == request.placed_images and sent.params == call.params
    assert sent.request.adapter == 2
    view = images_of_request(vision, sent.request)
    assert view is not None and view.spans == [(3, 2)]
    assert view.is_image.nonzero().flatten().tolist() == [3, 4]


def test_a_row_reaches_the_agent_with_its_images() -> None:
    chat = with_parts([{"role": "user", "content": "a<image>b"}], 1)
    prompt = Prompt(0, [5], "d", "t", "p", chat=chat, images=(Picture(png(0, 16, 8)),))
    row = AgentTask(prompt, 0, 1).row
    assert row["prompt"] == "ab" and row["messages"][0]["content"][1] == image(0)
    plain = [{"role": "user", "content": "hi"}]
    assert with_pictures(plain, ()) == plain


def test_limits_of_images_that_cannot_hold_are_refused(model: str) -> None:
    hf = load_hf_config(model)
    check_reply_images(hf, CONFIG)
    for agents, error in (
        (AgentConfig(max_images=1, max_image_tokens=300), "no image of that size fits"),
        (AgentConfig(max_image_tokens=4), "agents.max_image_tokens=4 has no effect"),
    ):
        with pytest.raises(ConfigError, match=error):
            check_reply_images(hf, replace(CONFIG, agents=agents))
    for shown, changed, error in (
        ((4, 2), {}, "a prompt has 4 images, and agents.max_images=3"),
        ((2, 9), {}, "has 9 tokens, more than agents.max_image_tokens=7"),
        ((1, 2), {"agent": ["prog", "{prompt}"]}, "let the agent be a function"),
    ):
        images = SimpleNamespace(per_prompt=shown[0], largest=(shown[1], 8, 8))
        data: Any = SimpleNamespace(images=images, data_sources=["d"])
        with pytest.raises(ConfigError, match=error):
            check_agent_data(replace(CONFIG, **changed), data)
