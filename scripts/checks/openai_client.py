#!/usr/bin/env python3
"""Talks to a running server with OpenAI's own client: pip install openai

    python scripts/checks/openai_client.py http://127.0.0.1:8000/v1 [API_KEY]
    python scripts/checks/openai_client.py --busy http://127.0.0.1:8000/v1

The model's template must know tools; for the built-in model, start the server with --chat-template
tests/fixtures/tok/chat/tools.jinja, and --responses-memory 100. With --busy it is checked that the client waits and tries again as the server says;
that needs a server for one request at a time (--max-num-seqs 1 --max-waiting 0).
"""

import collections
import sys
import threading
from typing import Literal

import openai
import pydantic
from clients import Weather
from harness import expect


class Paint(pydantic.BaseModel):
    """What a structured answer is read into."""

    colour: Literal["red", "green", "blue"]
    coats: Literal[1, 2, 3]
    is_glossy: bool
    places: list[Literal["wall", "door"]] = pydantic.Field(min_length=1, max_length=2)


def check_tools(client, model):
    """Calls that are asked for, whole and streamed, and what comes after them."""
    messages = [{"role": "user", "content": "The weather in Rome?"}]
    tool = openai.pydantic_function_tool(Weather)
    asked = dict(model=model, messages=messages, tools=[tool], temperature=0, max_tokens=120)
    named = {"type": "function", "function": {"name": "Weather"}}
    whole = client.chat.completions.create(tool_choice=named, **asked).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None, whole
    assert call.type == "function" and call.function.name == "Weather", call
    weather = Weather.model_validate_json(call.function.arguments)

    # The client's own way of putting a stream together, which also reads the arguments.
    with client.chat.completions.stream(tool_choice=named, **asked) as stream:
        names = {event.name for event in stream if event.type == "tool_calls.function.arguments.delta"}
        final = stream.get_final_completion().choices[0]
    assert names == {"Weather"} and final.finish_reason == "tool_calls", (names, final)
    assert final.message.tool_calls[0].function.parsed_arguments == weather, final
    assert final.message.tool_calls[0].id != call.id

    required = client.chat.completions.create(tool_choice="required", parallel_tool_calls=False, **asked)
    assert len(required.choices[0].message.tool_calls) == 1, required
    messages += [
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert client.chat.completions.create(tool_choice="auto", **asked).choices[0].message.content is not None
    none = client.chat.completions.create(tool_choice="none", **asked)
    assert none.choices[0].message.tool_calls is None, none
    unknown = {"type": "function", "function": {"name": "Climate"}}
    bad = expect(openai.BadRequestError, lambda: client.chat.completions.create(tool_choice=unknown, **asked))
    assert bad.param == "tool_choice", bad


def check_responses(client, model):
    """The interface for agents: whole, streamed, parsed, a loop with a tool, and what the server keeps."""
    asked = dict(model=model, input="Hello!", instructions="You are brief.", max_output_tokens=16, temperature=0)
    whole = client.responses.create(metadata={"run": "7"}, **asked)
    assert whole.output_text and whole.error is None and whole.metadata == {"run": "7"}, whole
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens, whole
    assert whole.usage.input_tokens_details.cached_tokens >= 0, whole
    events = list(client.responses.create(stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events))), events
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text, (text, whole)
    assert events[0].type == "response.created" and events[-1].type == f"response.{whole.status}", events
    cut = client.responses.create(**{**asked, "max_output_tokens": 1})
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens", cut

    # The client's own ways of reading answers and of putting streams together.
    parsed = client.responses.parse(model=model, input="Paint it", text_format=Paint, max_output_tokens=400)
    assert isinstance(parsed.output_parsed, Paint), parsed
    with client.responses.stream(text_format=Paint, model=model, input="Paint it", max_output_tokens=400) as stream:
        assert any(event.type == "response.output_text.delta" for event in stream)
        assert isinstance(stream.get_final_response().output_parsed, Paint)

    # A tool is called, and its result goes back with what came.
    tool = openai.pydantic_function_tool(Weather)["function"]
    tools = dict(model=model, tools=[{"type": "function", **tool}], temperature=0, max_output_tokens=120)
    items = [{"role": "user", "content": "The weather in Rome?"}]
    called = client.responses.create(input=items, tool_choice={"type": "function", "name": "Weather"}, **tools)
    (call,) = [item for item in called.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    with client.responses.stream(input=items, tool_choice="required", parallel_tool_calls=False, **tools) as stream:
        arguments = "".join(e.delta for e in stream if e.type == "response.function_call_arguments.delta")
        (streamed,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert streamed.arguments == arguments and Weather.model_validate_json(arguments), streamed
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = client.responses.create(input=[*items, *called.output, result], **tools)
    assert answer.output, answer

    # The server keeps responses.
    assert whole.store and client.responses.retrieve(whole.id).output_text == whole.output_text
    following = client.responses.create(model=model, input="And then?", previous_response_id=whole.id, max_output_tokens=8)
    roles = [item.role for item in client.responses.input_items.list(following.id, order="asc")]
    assert roles == ["user", "assistant", "user"], roles
    going_on = client.responses.create(input=[result], previous_response_id=called.id, **tools)
    assert going_on.output == [] or going_on.output[0].id != answer.output[0].id, going_on
    client.responses.delete(whole.id)
    expect(openai.NotFoundError, lambda: client.responses.retrieve(whole.id))
    # The server has no such tool: the model answers by itself, unless the tool is required.
    hosted = {"tools": [{"type": "web_search"}], **asked}
    assert client.responses.create(**hosted).output_text
    bad = expect(openai.BadRequestError, lambda: client.responses.create(tool_choice="required", **hosted))
    assert bad.param == "tool_choice", bad


def main(url, key="none"):
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model

    messages = [
        {"role": "developer", "content": "You are brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
    ]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=16, seed=1)
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0

    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_completion_tokens=16,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content, (text, whole)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[-1].choices and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )

    two = client.chat.completions.create(
        model=model, messages=messages, max_tokens=4, n=2, logprobs=True, top_logprobs=2, stop=["zzz"]
    )
    assert len(two.choices) == 2 and len(two.choices[1].logprobs.content[0].top_logprobs) == 2

    extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "return_token_ids": True}
    prompts = client.completions.create(
        model=model, prompt=["Once", "Twice"], max_tokens=5, logprobs=1, extra_body=extra
    )
    assert len(prompts.choices) == 2 and len(prompts.choices[0].logprobs.tokens) == 5
    assert len(prompts.choices[1].token_ids) == 5
    assert client.completions.create(model=model, prompt=[5, 6], max_tokens=2, echo=True).choices[0].text

    parsed = client.chat.completions.parse(
        model=model, messages=messages, response_format=Paint, max_tokens=400, seed=1
    )
    assert isinstance(parsed.choices[0].message.parsed, Paint), parsed
    assert parsed.choices[0].finish_reason == "stop"
    chosen = client.chat.completions.create(
        model=model, messages=messages, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert chosen.choices[0].message.content in ("yes", "no"), chosen

    check_tools(client, model)
    check_responses(client, model)

    bad = expect(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=model, messages=messages, temperature=9),
    )
    assert bad.param == "temperature" and "at most 2" in bad.message, bad
    expect(openai.NotFoundError, lambda: client.completions.create(model="other", prompt="x"))
    if key != "none":
        wrong = client.with_options(api_key="wrong")
        expect(openai.AuthenticationError, wrong.models.list)
    print(f"ok: openai {openai.__version__} and {model}")


def check_retries(url):
    """A refused client retries when the server says, and is served when a permit is free."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    asked = dict(model=model, prompt="Once", extra_body={"ignore_eos": True})

    def occupy():
        """Takes the only permit for a while."""
        stream = client.completions.create(max_tokens=800, stream=True, **asked)
        next(iter(stream))
        reader = threading.Thread(target=lambda: collections.deque(stream, maxlen=0))
        reader.start()
        return reader

    reader = occupy()
    busy = expect(openai.RateLimitError, lambda: client.completions.create(max_tokens=1, **asked))
    assert busy.code == "rate_limit_exceeded" and int(busy.response.headers["retry-after"]) >= 1, busy
    reader.join()
    reader = occupy()
    served = client.with_options(max_retries=30).completions.with_raw_response.create(max_tokens=1, **asked)
    assert served.retries_taken >= 1 and served.parse().choices[0].finish_reason == "length", served
    reader.join()
    print(f"ok: openai {openai.__version__} tried again {served.retries_taken} times")


if __name__ == "__main__":
    check_retries(sys.argv[2]) if sys.argv[1] == "--busy" else main(*sys.argv[1:])
