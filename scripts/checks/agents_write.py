#!/usr/bin/env python3
"""Has an agent of a framework write a file, through a whole loop: a call, its result, an answer.

    pip install openai-agents        # or "smolagents[openai]"; best in an environment each
    python scripts/checks/agents_write.py openai_agents http://127.0.0.1:8000/v1 MODEL FILE CONTENT

The tests run it against a server whose model calls `write_file` and then says that the file is written, with OpenAI's
agents by both interfaces. smolagents wants every answer to be a call, so its model calls `final_answer` then, and results
come back as words of the user.
"""

import pathlib
import sys


def write_file(path: str, content: str) -> str:
    """Writes a file.

    Args:
        path: Where it is.
        content: What is in it.
    """
    pathlib.Path(path).write_text(content)
    return "written"


def openai_agents(url, model):
    """Each interface's way to have the file written."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        tools = [agents.function_tool(write_file)]
        agent = agents.Agent(name="writer", model=kind(model=model, openai_client=client), tools=tools)
        yield lambda task, agent=agent: agents.Runner.run_sync(agent, task).final_output


def smolagents(url, model):
    """Whole answers, and streams."""
    import smolagents

    for is_stream in (False, True):
        server = smolagents.OpenAIServerModel(
            model_id=model, api_base=url, api_key="none", client_kwargs={"max_retries": 0}
        )
        tools = [smolagents.tool(write_file)]
        yield smolagents.ToolCallingAgent(tools=tools, model=server, stream_outputs=is_stream, max_steps=4).run


framework, url, model, file, content = sys.argv[1:]
for run in {"openai_agents": openai_agents, "smolagents": smolagents}[framework](url, model):
    pathlib.Path(file).unlink(missing_ok=True)
    answer = run("Write the file.")
    assert pathlib.Path(file).read_text() == content
print(answer)
