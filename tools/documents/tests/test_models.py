"""Rules that hold for each model of the wire."""

import json
import re

import pytest
from pydantic import BaseModel, ValidationError

from virtbus.documents.examples import full
from virtbus.documents.reference import all_models
from virtbus.schemas.model import LenientModel, StrictModel


@pytest.mark.parametrize("model", all_models(), ids=lambda model: model.__name__)
def test_commands_forbid_and_events_ignore_unknown_fields(model: type[BaseModel]) -> None:
    value = full(model).model_dump(by_alias=True) | {"of_the_future": 1}
    if issubclass(model, StrictModel):
        with pytest.raises(ValidationError):
            model.model_validate(value)
    else:
        assert issubclass(model, LenientModel)
        assert model.model_validate(value) == full(model)


@pytest.mark.parametrize("model", all_models(), ids=lambda model: model.__name__)
def test_an_instance_cannot_be_changed(model: type[BaseModel]) -> None:
    if name := next(iter(model.model_fields), None):
        with pytest.raises(ValidationError):
            setattr(full(model), name, None)


@pytest.mark.parametrize("model", all_models(), ids=lambda model: model.__name__)
def test_a_pattern_counts_no_long_repetition(model: type[BaseModel]) -> None:
    """The regex engine copies what repeats: `{16,8192}` took 10 MiB in each process."""
    patterns = re.findall(r'"pattern": "((?:[^"\\]|\\.)*)"', json.dumps(model.model_json_schema()))
    counts = [int(one) for text in patterns for one in re.findall(r"(\d+)\}", text)]
    assert max(counts, default=0) <= 256
