"""Run by test_clients.py: `python anthropic_smoke.py URL`; the gateway answers with a call if there are tools."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none")
common = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
assert client.messages.create(**common).content[0].text == "Hi there"
with client.messages.stream(**common) as stream:
    assert "".join(stream.text_stream) == "Hi there"
    assert stream.get_final_message().stop_reason == "end_turn"
tool = {"name": "add", "input_schema": {"type": "object"}}
with client.messages.stream(**common, tools=[tool]) as stream:
    final = stream.get_final_message()
assert final.stop_reason == "tool_use", final
assert final.content[-1].input == {"a": 1, "b": 2}, final
