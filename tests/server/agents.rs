//! Programs that work with tools by themselves, as they are installed and with what they send unasked, through a whole
//! loop: a call, its result, an answer. The model says what the test wants; everything else is real.
//!
//! They are looked for in the folder that TINYVLLM_AGENTS names: in npm's packages, or in a Python environment with the
//! program's name. Those that are not there are said to be skipped; those that TINYVLLM_REQUIRE_AGENTS lists have to be
//! there.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::Server;
use super::scripted::scripted_model;

/// Knows tools, and leaves out most of what an agent says, which is long: the model would not read it.
const TEMPLATE: &str = r#"
{%- set state = namespace(has_result = false) -%}
{%- for message in messages -%}
  {%- if message.tool_calls -%}
    {%- for call in message.tool_calls -%}
      <tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>
    {%- endfor -%}
  {%- elif message.role == 'tool' -%}
    {%- set state.has_result = true -%}
    <tool_response>{{ message.content }}</tool_response>
  {#- Some tell results in words of the user. -#}
  {%- elif message.role == 'user' and 'Observation:' in message.content -%}
    {%- set state.has_result = true -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {%- if state.has_result -%}<|done|>{%- elif tools -%}<|work|>{%- else -%}<|talk|>{%- endif -%}
{%- endif -%}
"#;

/// What the model says when the work is done.
const ANSWER: &str = "The file is written, as it should be.";

/// Longer than the slowest has taken alongside everything else that the tests do, which is twenty seconds.
const TIMEOUT: Duration = Duration::from_secs(180);

/// What is written to the file.
const CONTENT: &str = "by a scripted model";

/// The program of an agent that is installed, or a line that says that it is not.
fn program(name: &str, file: &str) -> Option<PathBuf> {
    let folder = std::env::var("TINYVLLM_AGENTS").unwrap_or_default();
    let program = Path::new(&folder).join(file);
    if !folder.is_empty() && program.exists() {
        return Some(program);
    }
    let required = std::env::var("TINYVLLM_REQUIRE_AGENTS").unwrap_or_default();
    assert!(!required.split_whitespace().any(|required| required == name), "{name} is not installed");
    // Past the capture of output, so that it is seen.
    let _ = writeln!(std::io::stderr(), "skipped: {name} is not in a folder that TINYVLLM_AGENTS names");
    None
}

/// What an agent is asked with.
struct Asked<'a> {
    agent: &'a mut Command,
    /// The server, without a path.
    url: &'a str,
    home: &'a Path,
    work: &'a Path,
    /// What is to be written.
    file: &'a str,
}

/// What the model says where it has tools, where they have answered, and where it has none.
struct Says {
    work: String,
    done: String,
    talk: String,
}

impl Says {
    /// It calls, and then it answers.
    fn call(call: &Value) -> Self {
        Self { work: written(call), done: ANSWER.to_owned(), talk: "A short title".to_owned() }
    }
}

/// A call as models write it, and as it is enforced where one is required.
fn written(call: &Value) -> String {
    let (name, arguments) = (&call["name"], &call["arguments"]);
    format!("<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>")
}

/// A call of a tool that the test itself gives to the agent.
fn write_file(path: &str) -> Value {
    json!({"name": "write_file", "arguments": {"path": path, "content": CONTENT}})
}

/// Has an agent of npm write a file: `call` is what its model does with the path, `ask` how it is asked without a person
/// alongside it.
#[track_caller]
fn writes_a_file(name: &str, call: impl FnOnce(&str) -> Value, ask: impl FnOnce(Asked<'_>)) {
    if let Some(program) = program(name, &format!("node_modules/.bin/{name}")) {
        run(name, &program, |path| Says::call(&call(path)), ask);
    }
}

/// The same for an agent of Python, whose model says this about the path.
#[track_caller]
fn writes_a_file_with_python(
    name: &str,
    program_name: &str,
    says: impl FnOnce(&str) -> Says,
    ask: impl FnOnce(Asked<'_>),
) {
    if let Some(program) = program(name, &format!("{name}/bin/{program_name}")) {
        run(name, &program, says, ask);
    }
}

#[track_caller]
fn run(name: &str, program: &Path, says: impl FnOnce(&str) -> Says, ask: impl FnOnce(Asked<'_>)) {
    let folder = tempfile::tempdir().unwrap();
    let (home, work) = (folder.path().join("home"), folder.path().join("work"));
    fs::create_dir(&home).unwrap();
    fs::create_dir(&work).unwrap();
    let file = work.join("written.txt");
    let Says { work: calls, done, talk } = says(file.to_str().unwrap());
    let scripts = [("<|work|>", calls.as_str()), ("<|done|>", &done), ("<|talk|>", &talk)];
    let model = scripted_model(TEMPLATE, &[], &scripts);
    let server = Server::start(&format!(
        "--model {} --served-model-name demo --tool-call-parser hermes --responses-memory 100",
        model.path().display()
    ));
    let mut agent = Command::new(program);
    // As a shell does; some look there.
    agent.current_dir(&work).env("PWD", &work).env("HOME", &home).stdin(Stdio::null());
    let (url, file_name) = (format!("http://{}", server.address()), file.to_str().unwrap());
    ask(Asked { agent: &mut agent, url: &url, home: &home, work: &work, file: file_name });
    let words = folder.path().join("printed");
    let printed_to = fs::File::create(&words).unwrap();
    let mut running =
        agent.stdout(printed_to.try_clone().unwrap()).stderr(printed_to).spawn().expect("the agent starts");
    let start = Instant::now();
    let status = loop {
        if let Some(status) = running.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > TIMEOUT {
            running.kill().unwrap();
            running.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let printed =
        format!("{}\n{}", String::from_utf8_lossy(&fs::read(&words).unwrap()), server.log().join("\n"));
    assert!(status.is_some_and(|status| status.success()), "{name} ended with {status:?}: {printed}");
    let written = fs::read_to_string(&file);
    assert!(written.is_ok_and(|text| text.trim() == CONTENT), "{name} wrote nothing: {printed}");
    assert!(printed.contains(ANSWER), "{name} does not show the answer: {printed}");
    let metrics = server.get("/metrics").text();
    let is_refusal = |line: &&str| {
        line.starts_with("tinyvllm_http_requests_total")
            && line.contains("status=\"4")
            && !line.ends_with(" 0")
    };
    let refusals: Vec<&str> = metrics.lines().filter(is_refusal).collect();
    assert!(refusals.is_empty(), "{name} is refused: {refusals:?}: {printed}");
}

#[test]
fn claude_code_writes_a_file() {
    let call = |path: &str| json!({"name": "Write", "arguments": {"file_path": path, "content": CONTENT}});
    writes_a_file("claude", call, |Asked { agent, url, .. }| {
        agent.args(["-p", "Write the file.", "--model", "demo", "--permission-mode", "acceptEdits"]);
        agent.env("ANTHROPIC_BASE_URL", url).env("ANTHROPIC_API_KEY", "none");
    });
}

#[test]
fn codex_writes_a_file() {
    let call = |path: &str| {
        let cmd = format!("printf '%s' '{CONTENT}' > '{path}'");
        json!({"name": "exec_command", "arguments": {"cmd": cmd}})
    };
    writes_a_file("codex", call, |Asked { agent, url, .. }| {
        // Its own sandbox does not start in every container.
        agent.args(["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-m", "demo"]);
        agent.args(["-c", "model_provider=local", "-c"]);
        agent.arg(format!(
            r#"model_providers.local={{name="local",base_url="{url}/v1",wire_api="responses",env_key="KEY"}}"#
        ));
        agent.arg("Write the file.").env("KEY", "none");
    });
}

#[test]
fn opencode_writes_a_file() {
    let call = |path: &str| json!({"name": "write", "arguments": {"filePath": path, "content": CONTENT}});
    writes_a_file("opencode", call, |Asked { agent, url, work, .. }| {
        let config = json!({
            "provider": {"local": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": format!("{url}/v1"), "apiKey": "none"},
                "models": {"demo": {}},
            }},
        });
        fs::write(work.join("opencode.json"), config.to_string()).unwrap();
        agent.args(["run", "Write the file.", "--model", "local/demo"]);
    });
}

#[test]
fn pi_writes_a_file() {
    let call = |path: &str| json!({"name": "write", "arguments": {"path": path, "content": CONTENT}});
    writes_a_file("pi", call, |Asked { agent, url, home, .. }| {
        let folder = home.join(".pi/agent");
        fs::create_dir_all(&folder).unwrap();
        let models = json!({"providers": {"local": {
            "baseUrl": format!("{url}/v1"), "api": "openai-completions", "apiKey": "none", "models": [{"id": "demo"}],
        }}});
        fs::write(folder.join("models.json"), models.to_string()).unwrap();
        agent.args(["-p", "Write the file.", "--provider", "local", "--model", "demo"]);
    });
}

#[test]
fn llm_writes_a_file() {
    writes_a_file_with_python(
        "llm",
        "llm",
        |path| Says::call(&write_file(path)),
        |Asked { agent, url, home, .. }| {
            let models = format!(
                "- model_id: demo\n  model_name: demo\n  api_base: {url}/v1\n  supports_tools: true\n  can_stream: true\n"
            );
            fs::write(home.join("extra-openai-models.yaml"), models).unwrap();
            let function = "def write_file(path: str, content: str) -> str:\n    open(path, 'w').write(content)\n    return 'written'\n";
            agent.args(["-m", "demo", "--functions", function, "Write the file."]);
            agent.env("LLM_USER_PATH", home).env("OPENAI_API_KEY", "none");
        },
    );
}

#[test]
fn openai_agents_writes_a_file() {
    writes_a_file_with_python(
        "openai_agents",
        "python",
        |path| Says::call(&write_file(path)),
        |Asked { agent, url, file, .. }| {
            agent.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/checks/agents_write.py"));
            agent.args(["openai_agents", &format!("{url}/v1"), "demo", file, CONTENT]);
        },
    );
}

#[test]
fn smolagents_writes_a_file() {
    // Its answer is a call too.
    let answer = written(&json!({"name": "final_answer", "arguments": {"answer": ANSWER}}));
    let says = |path: &str| Says { done: answer, ..Says::call(&write_file(path)) };
    writes_a_file_with_python("smolagents", "python", says, |Asked { agent, url, file, .. }| {
        agent.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/checks/agents_write.py"));
        agent.args(["smolagents", &format!("{url}/v1"), "demo", file, CONTENT]);
    });
}

#[test]
fn aider_writes_a_file() {
    // It knows no tools: a file is a block of text after its name.
    let says = |_: &str| Says {
        talk: format!("{ANSWER}\n\nwritten.txt\n```\n{CONTENT}\n```\n"),
        ..Says::call(&json!({}))
    };
    writes_a_file_with_python("aider", "aider", says, |Asked { agent, url, .. }| {
        agent.args(["--model", "openai/demo", "--message", "Write the file.", "--yes-always", "--no-git"]);
        agent.env("OPENAI_API_BASE", format!("{url}/v1")).env("OPENAI_API_KEY", "none");
    });
}
