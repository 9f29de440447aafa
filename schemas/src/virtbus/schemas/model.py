"""The base of every wire model."""

from pydantic import BaseModel, ConfigDict


class Command(BaseModel):
    """What a client sends. Unknown fields are refused, so that a typo is never ignored (INJ-05)."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_max_length=65536)


class Fact(BaseModel):
    """What virtbus itself says. Unknown fields are dropped, so that an older reader keeps reading.

    Additive changes only within a major: a field is added with a default, never renamed.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_bytes="base64")
