"""Run by test_clients.py: `python litellm_smoke.py URL`."""

import sys

import litellm

url = sys.argv[1]
HELLO = [{"role": "user", "content": "Hello"}]
common = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none"}
answer = litellm.completion(messages=HELLO, **common)
assert answer.choices[0].message.content == "Hi there", answer
assert answer.usage.prompt_tokens == 7
chunks = list(litellm.completion(messages=HELLO, stream=True, stream_options={"include_usage": True}, **common))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hi there", chunks
text = litellm.text_completion(
    prompt="Hello", model="text-completion-openai/tiny", api_base=f"{url}/v1", api_key="none"
)
assert text.choices[0].text == "Hi there", text
embedded = litellm.embedding(input=["Hello", "there"], encoding_format="float", **common)
assert [entry["embedding"] for entry in embedded.data] == [[0.0, 1.0]] * 2, embedded
ranked = litellm.rerank(
    model="jina_ai/tiny",
    query="Hello",
    documents=["there", "you"],
    top_n=1,
    api_base=f"{url}/v1/rerank",
    api_key="none",
)
assert [result["index"] for result in ranked.results] == [0], ranked
