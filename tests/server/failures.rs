//! The library's server while it loads, and with a device that fails.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use serde_json::json;
use tinyvllm::hub::{HubConfig, ModelSource, resolve};
use tinyvllm::llm::{Llm, LlmOptions, LoadProgress};
use tinyvllm::ops::gpu::{
    ChipClass, Constant, Gpu, GpuBuffer, GpuMemory, Launch, Library, Pipeline, PipelineLimits, Placement,
    Ticket,
};
use tinyvllm::weights::SharedBytes;
use tinyvllm::{Error, ErrorKind, Result};
use tinyvllm_server::{AccessLog, AccessRecord, Exit, Server, ServerConfig, StopHandle};

use super::client::{connect, get, named_events, post, post_bytes, read_answer};

const CHAT: &str = "/v1/chat/completions";

struct NoLog;

impl AccessLog for NoLog {
    fn record(&self, _record: AccessRecord) {}
}

/// A server of the library on a thread of its own.
struct InProcess {
    address: SocketAddr,
    stop: StopHandle,
    thread: JoinHandle<Result<Exit>>,
}

fn start(load: impl FnOnce(&dyn LoadProgress) -> Result<Llm> + Send + 'static) -> InProcess {
    let server = Server::bind(ServerConfig { port: 0, ..ServerConfig::default() }).unwrap();
    let (address, stop) = (server.address(), server.stop_handle());
    let run = move || server.run(Box::new(load), Arc::new(NoLog), &mut |_| ());
    InProcess { address, stop, thread: std::thread::spawn(run) }
}

fn load_demo(options: &LlmOptions, progress: &dyn LoadProgress) -> Result<Llm> {
    let source = ModelSource::parse("demo", None)?;
    Llm::load(&resolve(&source, &HubConfig::new(""), &tinyvllm::hub::NoProgress)?, options, progress)
}

fn wait_until_ready(address: SocketAddr) {
    while get(address, "/health").status != 200 {}
}

fn hello() -> serde_json::Value {
    json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})
}

#[test]
fn while_the_model_loads_the_server_reports_progress() {
    let (go, wait) = mpsc::channel::<()>();
    let (begun, has_begun) = mpsc::channel();
    let server = start(move |progress| {
        progress.begin("loading", 1_000);
        progress.advance(250);
        progress.compiling(9, 12);
        begun.send(()).unwrap();
        wait.recv().unwrap();
        progress.end();
        begun.send(()).unwrap();
        wait.recv().unwrap();
        load_demo(&LlmOptions::default(), progress)
    });
    has_begun.recv().unwrap();
    // 31.
    let health = get(server.address, "/health");
    assert_eq!(health.status, 503);
    assert_eq!(health.json(), json!({"status": "loading", "stage": "loading", "progress": 0.25}));
    for answer in [get(server.address, "/v1/models"), post(server.address, CHAT, &hello())] {
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
        assert_eq!(answer.json()["error"]["message"], "Loading model");
    }
    go.send(()).unwrap();
    has_begun.recv().unwrap();
    let health = get(server.address, "/health");
    assert_eq!(health.json(), json!({"status": "loading", "stage": "compiling kernels", "progress": 0.75}));
    go.send(()).unwrap();
    wait_until_ready(server.address);
    post(server.address, CHAT, &hello()).success();
    server.stop.stop();
    assert_eq!(server.thread.join().unwrap().unwrap(), Exit::Drained);
}

#[test]
fn a_model_that_cannot_be_loaded_ends_the_server() {
    let server = start(|_| Err(Error::invalid_model("the file is damaged")));
    assert_eq!(server.thread.join().unwrap().unwrap_err().message(), "the file is damaged");
}

/// A GPU on which every launch fails.
#[derive(Debug)]
struct Broken {
    failure: Failure,
}

/// How it fails.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Failure {
    Error,
    Lost,
    Panic,
}

#[repr(align(256))]
#[derive(Debug)]
struct Block([AtomicU8; 256]);

#[derive(Debug)]
struct Memory {
    blocks: Vec<Block>,
    len: usize,
}

impl GpuMemory for Memory {
    fn len(&self) -> usize {
        self.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        Some(NonNull::from(&self.blocks[0].0[0]).cast())
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

fn bytes_of(buffer: &GpuBuffer) -> impl Iterator<Item = &AtomicU8> {
    let memory: &Memory = buffer.0.as_any().downcast_ref().unwrap();
    memory.blocks.iter().flat_map(|block| &block.0)
}

impl Gpu for Broken {
    fn name(&self) -> &str {
        "Broken GPU"
    }

    fn class(&self) -> ChipClass {
        ChipClass::Base
    }

    fn working_set_bytes(&self) -> u64 {
        1 << 30
    }

    fn allocate(&self, len: usize, _placement: Placement) -> Result<GpuBuffer> {
        let new_block = || Block(std::array::from_fn(|_| AtomicU8::new(0)));
        let blocks = (0..len.div_ceil(256)).map(|_| new_block()).collect();
        Ok(GpuBuffer(Box::new(Memory { blocks, len })))
    }

    fn wrap(&self, _bytes: &SharedBytes) -> Result<Option<(GpuBuffer, usize)>> {
        Ok(None)
    }

    fn pipeline(
        &self,
        _library: &'static Library,
        _function: &str,
        _constants: &[Constant],
    ) -> Result<Pipeline> {
        Ok(Pipeline { index: 0, limits: PipelineLimits::APPLE })
    }

    fn dispatch(&self, _launch: &Launch<'_>) -> Result<()> {
        match self.failure {
            Failure::Error => Err(Error::internal("the device is out of memory")),
            Failure::Lost => Err(Error::new(ErrorKind::DeviceLost, "the device fell off the bus")),
            Failure::Panic => panic!("the device fell off the bus"),
        }
    }

    fn write(&self, target: &GpuBuffer, offset: usize, bytes: &[u8]) -> Result<()> {
        for (cell, byte) in bytes_of(target).skip(offset).zip(bytes) {
            cell.store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }

    fn read(&self, source: &GpuBuffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        for (cell, byte) in bytes_of(source).skip(offset).zip(bytes) {
            *byte = cell.load(Ordering::Relaxed);
        }
        Ok(())
    }

    fn commit(&self) -> Result<Ticket> {
        Ok(Ticket(0))
    }

    fn wait(&self, _ticket: Ticket) -> Result<()> {
        Ok(())
    }
}

fn start_broken(failure: Failure) -> InProcess {
    let options = LlmOptions { gpu: Some(Arc::new(Broken { failure })), ..LlmOptions::default() };
    let server = start(move |progress| load_demo(&options, progress));
    wait_until_ready(server.address);
    server
}

#[test]
fn a_step_that_fails_ends_its_requests_and_three_in_a_row_the_health() {
    let server = start_broken(Failure::Error);
    // 33: the engine continues, and so do answers.
    for num_failed in 1..=3 {
        let answer = post(server.address, CHAT, &hello());
        assert_eq!(answer.status, 500);
        let error = &answer.json()["error"];
        assert_eq!(error["type"], "server_error");
        assert!(error["message"].as_str().unwrap().contains("out of memory"), "{error}");
        assert_eq!(get(server.address, "/health").status, if num_failed < 3 { 200 } else { 503 });
    }
    let mut streamed = hello();
    streamed["stream"] = json!(true);
    let events = post(server.address, CHAT, &streamed).events();
    assert!(events.last().unwrap()["error"]["message"].as_str().unwrap().contains("out of memory"));
    // In the words of the other interfaces, whole and as streams.
    let body = json!({"input": "Hi", "max_output_tokens": 2});
    let answer = post(server.address, "/v1/responses", &body);
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (500, &json!("server_error")));
    let body = json!({"input": "Hi", "max_output_tokens": 2, "stream": true});
    let events = named_events(&post(server.address, "/v1/responses", &body));
    let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["response.created", "response.in_progress", "error", "response.failed"]);
    assert!(events[2]["message"].as_str().unwrap().contains("out of memory"), "{}", events[2]);
    let response = &events[3]["response"];
    assert_eq!((&response["status"], &response["error"]["code"]), (&json!("failed"), &json!("server_error")));
    let mut body = hello();
    let answer = post(server.address, "/v1/messages", &body);
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (500, &json!("api_error")));
    body["stream"] = json!(true);
    let events = named_events(&post(server.address, "/v1/messages", &body));
    assert_eq!(events.last().unwrap()["type"], "error");
    assert_eq!(events.last().unwrap()["error"]["type"], "api_error");
    server.stop.stop();
    assert_eq!(server.thread.join().unwrap().unwrap(), Exit::Drained);
}

#[test]
fn an_engine_that_panics_ends_all_requests_and_the_server() {
    answers_everybody_and_ends(Failure::Panic, "the engine failed: the device fell off the bus");
}

#[test]
fn a_lost_device_ends_all_requests_and_the_server() {
    answers_everybody_and_ends(Failure::Lost, "the device is lost: the device fell off the bus");
}

fn answers_everybody_and_ends(failure: Failure, why: &str) {
    let server = start_broken(failure);
    // 35: waiting requests get the error, as a whole answer and as a stream, and the program ends with an error.
    // Both have connected before either sends, since the server accepts no client once it has failed.
    let clients = [true, false].map(|is_stream| (is_stream, connect(server.address)));
    let answers: Vec<_> = std::thread::scope(|scope| {
        let ask = |is_stream: bool, mut stream: TcpStream| {
            let mut body = hello();
            body["stream"] = json!(is_stream);
            // The server may be gone before it has read this.
            let _ = stream.write_all(post_bytes(CHAT, "", &body.to_string()).as_bytes());
            stream.peek(&mut [0]).is_ok_and(|num_bytes| num_bytes > 0).then(|| read_answer(stream))
        };
        let threads = clients.map(|(is_stream, stream)| scope.spawn(move || ask(is_stream, stream)));
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(!answers.is_empty());
    for answer in &answers {
        let message = match answer.status {
            200 => answer.events().last().unwrap()["error"]["message"].clone(),
            status => {
                assert!(status == 500 || status == 503, "{status}");
                answer.json()["error"]["message"].clone()
            }
        };
        let message = message.as_str().unwrap();
        assert!(message.contains("fell off the bus") || message.contains("engine has stopped"), "{message}");
    }
    let error = server.thread.join().unwrap().unwrap_err();
    assert!(error.message().contains(why), "{error}");
}
