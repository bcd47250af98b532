#!/usr/bin/env python3
"""Has an agent of OpenAI's framework write a file, through a whole loop: a call, its result, an answer; with both interfaces.

    pip install openai-agents
    python scripts/check_openai_agents.py http://127.0.0.1:8000/v1 MODEL FILE CONTENT

The tests run it against a server whose model calls `write_file` and then says that the file is written.
"""

import pathlib
import sys

import agents
from openai import AsyncOpenAI


@agents.function_tool
def write_file(path: str, content: str) -> str:
    """Writes a file."""
    pathlib.Path(path).write_text(content)
    return "written"


url, model, file, content = sys.argv[1:]
agents.set_tracing_disabled(True)
client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
    pathlib.Path(file).unlink(missing_ok=True)
    agent = agents.Agent(name="writer", model=kind(model=model, openai_client=client), tools=[write_file])
    answer = agents.Runner.run_sync(agent, "Write the file.").final_output
    assert pathlib.Path(file).read_text() == content
print(answer)
