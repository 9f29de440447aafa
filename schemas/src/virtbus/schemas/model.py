"""The base of every wire model."""

from pydantic import BaseModel, ConfigDict


class Command(BaseModel):
    """The base of client requests. Unknown fields are refused, so no typo is ignored (INJ-05)."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_max_length=65536)


class Fact(BaseModel):
    """The base of virtbus' own messages. Readers drop unknown fields, so old readers keep working.

    Within a major version changes are additive: a field is added with a default and never renamed.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_bytes="base64")
