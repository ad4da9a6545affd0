"""A tokenizer, and conversations of a prompt under a config."""

from typing import Any

import pytest
from dialogues import LIMIT, PROMPT, chat_tokenizer, config_of

from spmdrl.config import MultiTurnConfig
from spmdrl.rollout.multi_turn.conversation import Dialogue, TurnHandler
from spmdrl.types import Prompt


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def talk(tokenizer: Any) -> Any:
    """A round of a sample of each prompt."""
    made: list[Dialogue] = []

    def begin(*prompts: Prompt, **fields: Any) -> TurnHandler:
        fields.setdefault("multi_turn", MultiTurnConfig(timeout_s=60, workers=1))
        made.append(Dialogue(config_of(**fields), tokenizer, 1))
        return made[-1].about([(prompt, 2) for prompt in prompts or (PROMPT,)], LIMIT)

    yield begin
    for each in made:
        each.close()
