"""What applications do, through the official `openai` package: any model that the server has will do."""

import asyncio
import concurrent.futures

import openai
import pytest

MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]


def test_models(client, model):
    found = client.models.retrieve(model)
    assert (found.id, found.object) == (model, "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=16, temperature=0)
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.message.role) == ("chat.completion", model, "assistant")
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.content
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 16
    assert 0 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens


def test_chat_stream(client, model):
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=16, temperature=0, stream=True, stream_options=options
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] in ("stop", "length")
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert len({chunk.id for chunk in chunks}) == 1
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=16, temperature=0)
    assert streamed == whole.choices[0].message.content


def test_chat_stream_helper(client, model):
    with client.chat.completions.stream(model=model, messages=MESSAGES, max_tokens=8, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        snapshot = stream.current_completion_snapshot
    assert text and text == snapshot.choices[0].message.content


def test_content_parts(client, model):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
    assert answer.choices[0].finish_reason


def test_second_turn_reuses_the_first(client, model):
    messages = [{"role": "user", "content": "Tell me about rivers. " * 10}]
    first = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
    messages += [first.choices[0].message.model_dump(include={"role", "content"}), {"role": "user", "content": "Go on."}]
    second = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_several_choices(client, model):
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=4, n=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    chunks = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=4, n=2, stream=True)
    finished = {chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason}
    assert finished == {0, 1}


def test_chat_logprobs(client, model):
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    assert tokens and all(token.logprob <= 0 for token in tokens)
    assert all(len(token.top_logprobs) == 2 and token.bytes is not None for token in tokens)


def test_stop_string(client, model):
    whole = client.completions.create(model=model, prompt="1 2 3 4 5 6", max_tokens=24, temperature=0).choices[0].text
    stop = whole[len(whole) // 2 :][:2]
    cut = client.completions.create(model=model, prompt="1 2 3 4 5 6", max_tokens=24, temperature=0, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_completions(client, model):
    answer = client.completions.create(model=model, prompt="The sky is", max_tokens=5, temperature=0, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    echoed = client.completions.create(model=model, prompt="The sky is", max_tokens=5, temperature=0, echo=True)
    assert echoed.choices[0].text == "The sky is" + answer.choices[0].text
    streamed = client.completions.create(model=model, prompt="The sky is", max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text
    both = client.completions.create(model=model, prompt=["The sky is", "A dog"], max_tokens=5, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1]


def test_token_prompts(client, model):
    answer = client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=2)
    assert answer.usage.prompt_tokens == 3


def test_vllm_extras(client, model):
    extras = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True}
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=6, seed=1, extra_body=extras)
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"messages": []}, "messages"),
        ({"temperature": 9}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"top_k": "many"}}, "top_k"),
    ],
)
def test_errors_name_the_field(client, model, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": model, "messages": MESSAGES, **fields})
    assert (error.value.param, error.value.type) == (param, "invalid_request_error")


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert error.value.code == "model_not_found"


def test_headers_name_the_worker(client, model):
    raw = client.chat.completions.with_raw_response.create(model=model, messages=MESSAGES, max_tokens=2)
    assert raw.headers["x-armature-worker"]
    assert int(raw.headers["x-armature-reused-blocks"]) >= 0
    wanted = {"x-armature-worker": raw.headers["x-armature-worker-id"], "x-request-id": "mine"}
    again = client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, max_tokens=2, extra_headers=wanted
    )
    assert again.headers["x-armature-worker"] == raw.headers["x-armature-worker"]
    assert again.headers["x-request-id"] == "mine"


def test_leaving_a_stream_early(client, model):
    stream = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2).choices


def test_many_at_once(client, model):
    def ask(number: int) -> str:
        messages = [{"role": "user", "content": f"Say the number {number}."}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0)
        return answer.choices[0].finish_reason

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(16))) <= {"stop", "length"}


def test_async_client(base_url, model):
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", timeout=120) as client:
            stream = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=4, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask())
