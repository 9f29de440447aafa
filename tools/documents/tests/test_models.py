"""Rules that hold for each model of the wire."""

import json
import re

import pytest
from pydantic import ValidationError

from virtbus.documents.examples import full
from virtbus.documents.reference import all_models
from virtbus.schemas.model import LenientModel, StrictModel


def test_commands_forbid_and_events_ignore_unknown_fields() -> None:
    for model in all_models():
        value = full(model).model_dump(by_alias=True) | {"of_the_future": 1}
        if issubclass(model, StrictModel):
            with pytest.raises(ValidationError):
                model.model_validate(value)
        else:
            assert issubclass(model, LenientModel)
            assert model.model_validate(value) == full(model)


def test_an_instance_cannot_be_changed() -> None:
    for model in all_models():
        for name in list(model.model_fields)[:1]:
            with pytest.raises(ValidationError):
                setattr(full(model), name, None)


def test_a_pattern_counts_no_long_repetition() -> None:
    """The regex engine copies what repeats: `{16,8192}` took 10 MiB in each process."""
    for model in all_models():
        schema = json.dumps(model.model_json_schema())
        patterns = re.findall(r'"pattern": "((?:[^"\\]|\\.)*)"', schema)
        counts = [int(one) for text in patterns for one in re.findall(r"(\d+)\}", text)]
        assert max(counts, default=0) <= 256, model.__name__
