"""Images that tools and environments return: as messages, as tokens, in both rollout engines and in
the trainer.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from reply_pictures import pixels, show, zoom
from tiny_models import png, save_qwen_vl
from transformers import AutoModelForImageTextToText, AutoTokenizer
from vision_checks import logprobs_alone, packed, vision_of

from spmdrl.config import ConfigError, DataConfig, MultiTurnConfig, PpoConfig, RolloutConfig
from spmdrl.data.image_limits import ImageLimits, largest_square
from spmdrl.data.images import BatchImages
from spmdrl.data.packing import pack_samples
from spmdrl.data.pictures import open_picture
from spmdrl.data.reply_images import (
    from_bytes,
    images_of_sample,
    key_of,
    keys_in,
    pictures_in,
    to_bytes,
    with_images,
)
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.model import TokenPolicy, build_model
from spmdrl.engines.fsdp.packed_rows import Packing
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.rewards.workers.worker import Reply
from spmdrl.rollout.answer_codec import resume
from spmdrl.rollout.base import NOT_CHOSEN, Completion, Request, SamplingParams
from spmdrl.rollout.hf.engine import HfEngine
from spmdrl.rollout.multi_turn.conversation import Dialogue, said_by_environment, tool_message
from spmdrl.rollout.multi_turn.images import ImageRules, ShownImages
from spmdrl.rollout.multi_turn.tools import Call
from spmdrl.rollout.sampling import SampleRequest, as_samples, completion_of
from spmdrl.rollout.vllm.engine import VllmEngine
from spmdrl.training.checks.turns import check_reply_images
from spmdrl.types import Picture, Prompt, Sample

ENGINES: dict[str, Any] = {"vllm": VllmEngine, "hf": HfEngine}
LIMITS = MultiTurnConfig(max_images=3, max_image_tokens=8, workers=1)
PARAMS = SamplingParams(max_tokens=400)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_qwen_vl(tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Any:
    """The model's, with the names of tool calls: their ids are no token of the model's."""
    made = AutoTokenizer.from_pretrained(model)
    made.add_tokens(["<tool_call>", "</tool_call>"])
    return made


def config_of(**fields: Any) -> PpoConfig:
    base = PpoConfig(
        "m", DataConfig("t"), "math", rollout=RolloutConfig(max_tokens=400), multi_turn=LIMITS
    )
    return replace(base, **fields)


def said(tokenizer: Any, text: str) -> Completion:
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], 2]
    return Completion(ids, [-0.5] * len(ids), "stop", [3] * len(ids))


def replied(talk: Any, tokenizer: Any, text: str) -> Completion:
    """The answer with the reply to this turn."""
    turn = said(tokenizer, text)
    assert talk.ask(0, turn)
    while not (answers := talk.came()):
        pass
    return answers[0]


def calls(*arguments: dict[str, Any]) -> str:
    return "".join(
        f"<tool_call>{json.dumps({'name': 'zoom', 'arguments': a})}</tool_call>" for a in arguments
    )


@pytest.mark.programs
def test_a_tool_returns_images_in_several_forms(model: str, tokenizer: Any) -> None:
    """Each is a part of the message, and stands in the answer as its tokens; what cannot be shown
    is told to the policy as any failure of a tool."""
    vision, prompt = vision_of(model), Prompt(0, [5], "d", "", "x")
    dialogue = Dialogue(config_of(tools=(zoom,)), tokenizer, 1, vision)
    talk = dialogue.about([(prompt, 0)], PARAMS)
    image = Picture(png(1, 16, 8))
    right = {"image": [], "bytes": [], "gray": [], "verl": ["here"], "openai": ["here"]}
    for kind, words in right.items():
        answer = replied(talk, tokenizer, calls({"part": 1, "kind": kind}))
        (message,) = json.loads(answer.replies[0])
        texts = [part["text"] for part in message["content"] if part["type"] == "text"]
        (found,) = pictures_in([message])
        assert (answer.finish_reason, texts) == ("abort", words), answer.replies
        assert kind == "gray" or open_picture(found).tobytes() == open_picture(image).tobytes()
        own = [i for i, v in zip(answer.token_ids, answer.versions, strict=True) if v == NOT_CHOSEN]
        mark = vision.token_id
        start, end = own.index(mark), len(own) - own[::-1].index(mark)
        assert own[start:end] == vision.layout(found)
        assert tokenizer.decode(own[end:]).startswith("<|vision_end|>")
    wrong = {
        "web": "https://a.b/c.png' beside or in place of an image; expected an image of Pillow",
        "large": "64 x 64 pixels, which has 16 tokens, more than multi_turn.max_image_tokens=8",
        "broken": "what is no image: an image of 60 bytes cannot be read",
        "nested": "'dict' beside or in place of an image",
    }
    for kind, problem in wrong.items():
        part = {"part": 1, "kind": kind}
        answer = replied(talk, tokenizer, calls(part))
        (message,) = json.loads(answer.replies[0])
        assert message["is_error"] and problem in message["content"], message
    answer = replied(talk, tokenizer, calls(*[{"part": i, "kind": "two"} for i in range(2)]))
    first, second = json.loads(answer.replies[0])
    assert [part["type"] for part in first["content"]] == ["image", "text", "image"]
    assert (
        "a sample may be shown multi_turn.max_images=3, and has been shown 2" in (second["content"])
    )
    dialogue.close()


@pytest.mark.programs
def test_images_that_nobody_allowed_are_told(
    model: str, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = Prompt(0, [5], "d", "", "x")
    for vision, limits, problem in (
        (vision_of(model), MultiTurnConfig(workers=1), "multi_turn.max_images=0 allows none"),
        (None, LIMITS, "the model sees none"),
    ):
        dialogue = Dialogue(config_of(environment=show, multi_turn=limits), tokenizer, 1, vision)
        answer = replied(dialogue.about([(prompt, 0)], PARAMS), tokenizer, "7")
        assert answer.finish_reason == "error"
        assert f"the environment returned an image, and {problem}" in answer.replies[0]
        assert problem in caplog.text
        dialogue.close()


def test_limits_that_cannot_hold_are_refused(model: str) -> None:
    hf, vision = load_hf_config(model), vision_of(model)
    for fields, error in (
        ({"multi_turn": MultiTurnConfig(max_images=1, max_image_tokens=400)}, "no image of that"),
        ({"multi_turn": MultiTurnConfig(max_image_tokens=4)}, "max_image_tokens=4 has no effect"),
    ):
        with pytest.raises(ConfigError, match=error):
            check_reply_images(hf, config_of(environment=show, **fields))
    with pytest.raises(ConfigError, match="max_image_tokens=0: an image of this model has more"):
        ImageLimits(vision, 0, 0, (0, 0)).with_replies(2, 0)
    side, tokens = largest_square(vision, 9)
    assert (side, tokens) == (24, 9)
    found = ImageLimits(vision, 2, 4, (16, 16)).with_replies(3, 12)
    assert (found.per_prompt, found.tokens, found.size) == (5, 12, (24, 24))


def test_images_travel_as_files_under_their_numbers() -> None:
    shown = [Picture(png(seed, 8, 8)) for seed in range(3)]
    by_key = {key_of(picture): picture for picture in shown}
    marks = torch.tensor([0, key_of(shown[2]), 0, key_of(shown[0]), key_of(shown[2])])
    assert keys_in(marks) == sorted([key_of(shown[0]), key_of(shown[2])])
    arrived = from_bytes(to_bytes(by_key, keys_in(marks)))
    assert {key: picture.encoded for key, picture in arrived.items()} == {
        key: by_key[key].encoded for key in keys_in(marks)
    }
    assert from_bytes(to_bytes(by_key, [])) == {}


def sampled(engine: Any, vision: Any, tokenizer: Any) -> list[Sample]:
    """Conversations of three turns of six tokens, with an image, two images or none as replies, and
    with and without one in the prompt. The last one's policy says the token of images."""
    pictures = (Picture(png(0, 16, 24)),)
    seen = Prompt(0, vision.placed([5, vision.token_id, 6], pictures), "d", "", "", images=pictures)
    blind = Prompt(1, [8, 9, 10], "d", "", "")
    dialogue = Dialogue(config_of(environment=show), tokenizer, 1, vision)
    asked = [(seen, 0), (blind, 1), (blind, 3), (seen, 2)]
    talk = dialogue.about(asked, PARAMS)
    answers = [Completion([], [], "abort")] * len(asked)
    for turn in range(3):
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        requests = [
            resume(
                Request(prompt.token_ids, seed=i, images=prompt.images,
                        max_tokens=len(answer.token_ids) + 6), answer,
            )
            for i, ((prompt, _), answer) in enumerate(zip(asked, answers, strict=True))
        ]  # fmt: skip
        answers = [replace(a, finish_reason="stop") for a in engine.generate(requests, params)]
        if turn == 0:
            answers[3].token_ids[2] = vision.token_id
        for i, answer in enumerate(answers) if turn < 2 else ():
            assert talk.ask(i, answer)
        while talk.pending:
            for i, answer in talk.came().items():
                assert answer.finish_reason == "abort", answer.replies
                answers[i] = answer
    dialogue.close()
    questions = [SampleRequest(prompt, 0, i, 0) for i, (prompt, _) in enumerate(asked)]
    return as_samples(questions, answers, tokenizer)


@pytest.mark.engine
@pytest.mark.parametrize("name", [pytest.param("vllm", marks=pytest.mark.vllm), "hf"])
def test_engine_trainer_and_transformers_see_the_same_conversation(
    model: str, tokenizer: Any, topology: Topology, name: str
) -> None:
    """Log-probabilities per token: of the engine, which went on behind the images of replies; of
    the trainer, from a packed batch; of transformers, whose own rope index and processor are given
    each sequence alone."""
    vision = vision_of(model)
    looks = ImageLimits(vision, 1, 6, (16, 24)).with_replies(3, 8)
    config = RolloutConfig(dtype="float32", max_num_seqs=64, kv_cache_mib=64)
    engine = ENGINES[name](model, config, 450, topology, looks=looks)
    samples = sampled(engine, vision, tokenizer)
    engine.shutdown()
    assert [len(images_of_sample(vision, sample)) for sample in samples] == [3, 3, 0, 3]
    assert as_samples(
        [SampleRequest(s.prompt, 0, i, 0) for i, s in enumerate(samples)],
        [completion_of(sample) for sample in samples], tokenizer,
    ) == samples  # fmt: skip
    batch = pack_samples(samples)
    prompts = {sample.prompt.id: sample.prompt for sample in samples}
    images = BatchImages(vision, prompts.__getitem__)
    images.mark(batch, samples)
    ours: Any = build_model(model, full=True)
    got = trainer_logprobs(ours, images, batch)
    mask = batch.loss_mask > 0
    # the token that was put in place of one that the engine drew, and has no log-probability
    start = int(batch.cu_seqlens[3]) + len(samples[3].prompt.token_ids)
    mask[start : start + 6] = False
    torch.testing.assert_close(got[mask], batch.rollout_logprobs[mask], rtol=1e-4, atol=1e-5)

    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    # a policy's own token of images is one that transformers takes for an image
    usual = [
        number for number, sample in enumerate(samples) if vision.token_id not in chosen_of(sample)
    ]
    assert len(usual) >= 2
    for number in usual:
        sample = samples[number]
        shown = [picture for _, picture in images_of_sample(vision, sample)]
        whole = replace(
            sample.prompt, token_ids=[*sample.prompt.token_ids, *sample.response_ids],
            images=(*sample.prompt.images, *shown),
        )  # fmt: skip
        want = logprobs_alone(plain, vision, whole, [])
        first, end = batch.cu_seqlens[number : number + 2].tolist()
        torch.testing.assert_close(got[first + 1 : end], want, rtol=1e-4, atol=1e-5)


def chosen_of(sample: Sample) -> list[int]:
    return [t for t, m in zip(sample.response_ids, sample.loss_mask, strict=True) if m]


def trainer_logprobs(model: Any, images: BatchImages, batch: Any) -> torch.Tensor:
    """(num_tokens,); 0 at each sequence's first."""
    lens = batch.seq_lens.tolist()
    rows = torch.cat([torch.arange(1, n) + sum(lens[:i]) for i, n in enumerate(lens)])
    positions = torch.cat([torch.arange(n) for n in lens])
    packing = Packing.build(batch.seq_lens, torch.device("cpu"))
    with torch.no_grad():
        found, *_ = TokenPolicy(model)(
            batch.token_ids, positions, packing, rows - 1, batch.token_ids[rows], 1.0,
            scene=images.scene(batch),
        )  # fmt: skip
    return torch.zeros(batch.num_tokens).index_copy(0, rows, found)


def test_plain_values_stay_what_they_were() -> None:
    assert Reply.of({"a": [1.5, "x"], "b": b"no image"}).value == {
        "a": [1.5, "x"],
        "b": "no image",
    }
    (part,) = Reply.of([pixels(0, 8, 8)]).value
    assert part["type"] == "image" and part["image"].startswith("data:image/png;base64,")


def test_the_kind_of_an_image_is_that_of_its_bytes() -> None:
    assert Reply.of(b"BMW 328, 1937").value == "BMW 328, 1937"
    for kind in ("bmp", "webp", "gif", "tiff", "jpeg", "png"):
        file = io.BytesIO()
        pixels(0, 8, 8).save(file, kind)
        uri = Reply.of(file.getvalue()).value["image"]
        assert uri.startswith(f"data:image/{kind};base64,"), uri[:40]
        wrong = uri.replace(f"image/{kind}", "image/svg+xml")
        assert with_images(wrong) == [{"type": "image", "image": uri}]
    assert with_images("data:image/x;base64,aGk=")[0]["image"] == "data:image/x;base64,aGk="


URI = Reply.of(png(0, 8, 8)).value["image"]


@pytest.mark.parametrize(
    ("value", "allowed", "expected"),
    [
        ({"image": "nginx:latest"}, True, '{"image": "nginx:latest"}'),
        ({"image": "nginx:latest", "status": "up"}, False, '{"image": "nginx:latest", "st'),
        ({"text": "hi", "image": None}, True, '{"text": "hi", "image": null}'),
        ({"text": "hi", "image": []}, True, '{"text": "hi", "image": []}'),
        ({"image": URI, "video": None}, True, [{"type": "image", "image": URI}]),
        ({"image": [URI]}, False, "Error: the tool returned an image, and the model sees none"),
        ({"image": URI, "status": "up"}, True, "Error: the tool returned an image beside status"),
        ({"title": "x", "icon": URI}, False, '{"title": "x", "icon": "data:image/png'),
        ({"title": "x", "icon": URI}, True, "Error: the tool returned 'dict' beside or in place"),
        ([{"type": "text"}, URI], True, "Error: the tool returned 'dict' beside or in place"),
        ([{"type": "text"}, {"title": URI}], False, '[{"type": "text"}, {"title": "data:'),
    ],
)
def test_a_value_without_an_image_in_its_place_stays_text(
    model: str, value: Any, allowed: bool, expected: Any
) -> None:
    rules = ImageRules(vision_of(model) if allowed else None, LIMITS)
    reply = ShownImages(rules, Completion([1], [0.0], "stop", [1])).of_tool(Reply(value))
    content = tool_message(Call("f", {}), reply)["content"]
    assert content == expected if isinstance(expected, list) else content.startswith(expected)
    messages, _, problem = said_by_environment(Reply(value), rules)
    assert bool(messages) != bool(problem)


def test_an_image_elsewhere_than_at_its_place_is_told(model: str) -> None:
    vision, picture = vision_of(model), Picture(png(0, 16, 8))
    prompt = Prompt(0, [5], "d", "", "")
    layout = vision.layout(picture)
    reply = Reply.of(pixels(0, 32, 16)).value  # of other tokens
    message = {"role": "user", "content": [reply]}
    answer = Completion(
        [4, *layout, 6], [0.0] * (2 + len(layout)), "stop", [1, *[NOT_CHOSEN] * len(layout), 1],
        [json.dumps([message])],
    )  # fmt: skip
    sample = Sample(
        prompt, 0, 0, answer.token_ids, answer.logprobs, [1, *[0] * len(layout), 1],
        answer.versions, "stop", messages=[{"role": "assistant", "content": "x"}, message],
    )  # fmt: skip
    with pytest.raises(ValueError, match="are not those of its images"):
        images_of_sample(vision, sample)


def test_a_packed_batch_without_replies_is_as_ever(model: str) -> None:
    prompts = {0: Prompt(0, [5, 6], "d", "", "")}
    vision = vision_of(model)
    scene = BatchImages(vision, prompts.__getitem__).scene(packed([prompts[0]], [[7]]))
    assert not scene.is_image.any()
