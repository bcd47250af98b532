#!/usr/bin/env python3
"""Has an agent of smolagents write a file, through a whole loop: a call, its result, a call that is the answer.

    pip install "smolagents[openai]"
    python scripts/check_smolagents.py http://127.0.0.1:8000/v1 MODEL FILE CONTENT

The tests run it against a server whose model calls `write_file` and then `final_answer`. Every answer has to be a call,
and results come back as words of the user.
"""

import pathlib
import sys

import smolagents


@smolagents.tool
def write_file(path: str, content: str) -> str:
    """Writes a file.

    Args:
        path: Where it is.
        content: What is in it.
    """
    pathlib.Path(path).write_text(content)
    return "written"


url, model, file, content = sys.argv[1:]
for is_stream in (False, True):
    pathlib.Path(file).unlink(missing_ok=True)
    server = smolagents.OpenAIServerModel(model_id=model, api_base=url, api_key="none", client_kwargs={"max_retries": 0})
    agent = smolagents.ToolCallingAgent(tools=[write_file], model=server, stream_outputs=is_stream, max_steps=4)
    answer = agent.run("Write the file.")
    assert pathlib.Path(file).read_text() == content
print(answer)
