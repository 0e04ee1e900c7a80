"""Run by test_clients.py: `python langchain_smoke.py URL`; the gateway answers with a call if there are tools."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(model="tiny", base_url=f"{sys.argv[1]}/v1", api_key="none")
assert model.invoke("Hello").content == "Hi there"
assert "".join(chunk.content for chunk in model.stream("Hello")) == "Hi there"
question = HumanMessage("Add 1 and 2")
answer = model.bind_tools([add]).invoke([question])
[call] = answer.tool_calls
assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2}), answer
result = ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])
assert model.invoke([question, answer, result]).content == "Hi there"
streamed = None
for chunk in model.bind_tools([add]).stream([question]):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed.tool_calls[0]["args"] == {"a": 1, "b": 2}, streamed
responses = ChatOpenAI(model="tiny", base_url=f"{sys.argv[1]}/v1", api_key="none", use_responses_api=True)
assert responses.invoke("Hello").text == "Hi there"
# Otherwise it encodes texts itself, with the vocabulary of OpenAI's models.
vectors = OpenAIEmbeddings(
    model="tiny", base_url=f"{sys.argv[1]}/v1", api_key="none", check_embedding_ctx_length=False
).embed_documents(["Hello", "there"])
assert vectors == [[0.0, 1.0]] * 2, vectors
