"""A call of a tool; the model's chat template has to know tools. pip install openai."""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.getenv("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key=os.getenv("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id
city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
tools = [{"type": "function", "function": {"name": "weather", "parameters": city, "strict": True}}]
messages = [{"role": "user", "content": "The weather in Rome?"}]
answer = client.chat.completions.create(model=model, messages=messages, tools=tools, tool_choice="required")
for call in answer.choices[0].message.tool_calls:
    print(call.function.name, json.loads(call.function.arguments))
