"""Run by test_clients.py: `python instructor_smoke.py URL`; the gateway answers a forced call with its arguments."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class add(BaseModel):  # noqa: N801  (the tool's name)
    """Two numbers to add."""

    a: int
    b: int


client = instructor.from_openai(OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"), mode=instructor.Mode.TOOLS)
messages = [{"role": "user", "content": "Add 1 and 2"}]
answer = client.chat.completions.create(model="tiny", messages=messages, response_model=add)
assert answer.model_dump() == {"a": 1, "b": 2}, answer
