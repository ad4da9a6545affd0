"""What an embedded step knows of a host's TransformerConfig: every field, each in one place."""

import dataclasses
from collections import Counter

import pytest

from spmdrl.engines.megatron import cpu_shim as mcore_cpu
from spmdrl.engines.megatron.external_model import expert_layers
from spmdrl.engines.megatron.external_model_fields import REFUSED, known_fields, refused_fields


@pytest.fixture(scope="module")
def config_class():
    mcore_cpu.install()
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return MLATransformerConfig


def test_every_field_of_megatron_is_known_once(config_class):
    fields = {field.name for field in dataclasses.fields(config_class)}
    counts = Counter(known_fields())
    assert {name for name, count in counts.items() if count > 1} == set()
    assert set(counts) == fields


def test_the_accepted_values_are_megatron_s_defaults(config_class):
    config = config_class(num_layers=2, hidden_size=8, num_attention_heads=2)
    for name, (accepted, _) in REFUSED.items():
        assert getattr(config, name) == accepted, name
    assert refused_fields(config) == []


def test_a_field_of_a_later_version_is_refused_unless_it_has_its_default(config_class):
    later = dataclasses.make_dataclass(
        "Later", [("rope_on_values", bool, False)], bases=(config_class,)
    )
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    assert refused_fields(later(**sizes)) == []
    (said,) = refused_fields(later(**sizes, rope_on_values=True))
    assert "rope_on_values=True" in said and "0.16.1" in said


def test_layers_with_experts_are_compared_however_they_are_written(config_class):
    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    assert expert_layers(config_class(**sizes, moe_layer_freq=2)) == [1, 0, 1, 0]
    assert expert_layers(config_class(**sizes, moe_layer_freq=[0, 1, 1, 1])) == [0, 1, 1, 1]
