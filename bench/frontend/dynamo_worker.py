"""A Dynamo worker without an engine: all tokens of an answer are there at once. It publishes no KV events.

Arguments: folder with the tokenizer, name of the model.
"""

import asyncio
import sys

import uvloop
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

CONTEXT_TOKENS = 131072
BLOCK_TOKENS = 16
BLOCKS = 1 << 16
# A token of plain text in any vocabulary of usual size.
TOKEN = 1000


async def answer(request, context):
    # Dynamo passes `context` by name; what it is for, cancellation, comes too late here.
    tokens = request["stop_conditions"].get("max_tokens") or 16
    for number in range(1, tokens):
        yield {"token_ids": [TOKEN + number]}
    yield {"token_ids": [TOKEN], "finish_reason": "length"}


async def serve(folder, name):
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("bench.backend.generate")
    config = ModelRuntimeConfig()
    config.context_length = CONTEXT_TOKENS
    config.total_kv_blocks = BLOCKS
    config.kv_event_publishing_enabled = False
    await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, folder, name, kv_cache_block_size=BLOCK_TOKENS,
                         runtime_config=config, worker_type=WorkerType.Aggregated)
    await endpoint.serve_endpoint(answer, graceful_shutdown=False)


uvloop.run(serve(*sys.argv[1:]))
