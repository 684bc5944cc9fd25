"""Fixtures: the official client against the server at ARMATURE_BASE_URL, e.g. http://127.0.0.1:8000/v1."""

import os

import openai
import pytest


@pytest.fixture(scope="session")
def base_url() -> str:
    url = os.environ.get("ARMATURE_BASE_URL")
    if not url:
        pytest.fail("set ARMATURE_BASE_URL to the server's /v1 URL")
    return url


@pytest.fixture(scope="session")
def client(base_url: str):
    with openai.OpenAI(base_url=base_url, api_key="unused", timeout=120, max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def model(client) -> str:
    return client.models.list().data[0].id
