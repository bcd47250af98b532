"""An answer of `tinyvllm serve` as it comes; pip install openai."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.getenv("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key=os.getenv("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Tell me a story."}]
for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=60, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
