"""An answer in a given format, whatever the model; pip install openai."""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    """What the answer is read into."""

    kind: Literal["cat", "dog", "bird"]
    legs: Literal[2, 4]


client = OpenAI(base_url=os.getenv("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key=os.getenv("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "An animal of the farm."}]
answer = client.chat.completions.parse(model=model, messages=messages, response_format=Animal)
print(answer.choices[0].message.parsed)
