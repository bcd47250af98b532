//! The chat page in a headless Chromium, which is driven over the DevTools protocol.
//!
//! Messages go through two pipes (`--remote-debugging-pipe`): JSON, each ended by a zero byte. So there is no
//! port to find and no WebSocket.

mod appearance;
mod conversation;
mod conversations;
mod formulas;
mod growing;
mod habits;
mod hostile;
mod markdown;
mod scripted;
mod sending;
mod turns;

use std::cell::{Cell, RefCell};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use super::client::{Server, TIMEOUT};

/// A condition that a page evaluates again and again until it holds, and a timeout.
const UNTIL: &str = "(condition) => new Promise((resolve, reject) => {
    const start = performance.now();
    const look = () => {
        let found = false;
        try { found = condition(); } catch {}
        if (found) resolve(found);
        else if (performance.now() - start > 50000) reject(new Error(`never: ${condition}`));
        else setTimeout(look, 5);
    };
    look();
})";

/// Until the page has seen that it was scrolled or has grown, and has scrolled itself.
const FRAME: &str = "new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)))";

/// A promise of what a request to the store of the page's database gives.
fn with_store(request: &str) -> String {
    format!(
        "new Promise((resolve, reject) => {{
            const opening = indexedDB.open('tinyvllm', 1);
            opening.onerror = reject;
            opening.onsuccess = () => {{
                const store = opening.result.transaction('conversations', 'readwrite').objectStore('conversations');
                const request = {request};
                request.onsuccess = () => {{ opening.result.close(); resolve(request.result); }};
                request.onerror = reject;
            }};
        }})"
    )
}

/// Browsers run one after the other: they would take the processors away from tests that other tests wait for.
static TURN: Mutex<()> = Mutex::new(());

/// A tab of a browser of its own, closed when dropped.
struct Page {
    child: Child,
    commands: RefCell<ChildStdin>,
    messages: Receiver<Value>,
    session: String,
    num_commands: Cell<u64>,
    events: RefCell<Vec<Value>>,
    _profile: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Page {
    /// Starts a browser; prints a line and returns None if there is none and none is required.
    fn start() -> Option<Self> {
        let Some(program) = chromium() else {
            let is_required = std::env::var_os("TINYVLLM_REQUIRE_CHROMIUM").is_some();
            assert!(!is_required, "there is no Chromium; TINYVLLM_CHROMIUM says where it is");
            // Past the capture of output, so that it is seen.
            let _ = writeln!(std::io::stderr(), "skipped: no Chromium to open the chat page with");
            return None;
        };
        // A test that failed in its turn has ended its browser.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let profile = tempfile::tempdir().unwrap();
        // The browser reads commands from descriptor 3 and answers on 4. No sandbox, because containers have no
        // means for it, and it only sees what these tests serve.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1", "sh", &program])
            .args(["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"])
            .args(["--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"])
            .args(["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--lang=en-US"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            loop {
                let mut bytes = Vec::new();
                let is_read = output.read_until(0, &mut bytes).is_ok_and(|num_bytes| num_bytes > 0);
                if !is_read || bytes.pop() != Some(0) {
                    return;
                }
                if sender.send(serde_json::from_slice(&bytes).unwrap()).is_err() {
                    return;
                }
            }
        });
        let mut page = Self {
            commands: RefCell::new(child.stdin.take().unwrap()),
            child,
            messages,
            session: String::new(),
            num_commands: Cell::new(0),
            events: RefCell::default(),
            _profile: profile,
            _turn: turn,
        };
        page.session = page.new_tab();
        page.resize(1_100, 760);
        Some(page)
    }

    /// Opens another tab of the same browser; the session to talk with it.
    fn new_tab(&self) -> String {
        let target = self.call("Target.createTarget", &json!({"url": "about:blank"}));
        let target = json!({"targetId": target["targetId"], "flatten": true});
        let session = self.call("Target.attachToTarget", &target)["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Runtime", "Log", "Network", "Accessibility"] {
            self.call_in(&session, &format!("{domain}.enable"), &json!({}));
        }
        session
    }

    /// Sends a command and returns what it gives. Events that come before are kept.
    #[track_caller]
    fn call(&self, method: &str, params: &Value) -> Value {
        self.call_in(&self.session, method, params)
    }

    #[track_caller]
    fn call_in(&self, session: &str, method: &str, params: &Value) -> Value {
        let id = self.num_commands.get() + 1;
        self.num_commands.set(id);
        let mut command = json!({"id": id, "method": method, "params": params});
        let is_for_browser = method.starts_with("Target.") || method.starts_with("SystemInfo.");
        if !is_for_browser {
            command["sessionId"] = json!(session);
        }
        let mut bytes = command.to_string().into_bytes();
        bytes.push(0);
        self.commands.borrow_mut().write_all(&bytes).unwrap();
        loop {
            let mut message = self.receive();
            if message["id"] == json!(id) {
                assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                return message["result"].take();
            }
            self.events.borrow_mut().push(message);
        }
    }

    #[track_caller]
    fn receive(&self) -> Value {
        self.messages.recv_timeout(TIMEOUT).expect("the browser answers")
    }

    /// Opens an address and waits until it is loaded.
    #[track_caller]
    fn open(&self, url: &str) {
        let is_load = |event: &Value| event["method"] == "Page.loadEventFired";
        let num_before = self.events.borrow().iter().filter(|event| is_load(event)).count();
        let answer = self.call("Page.navigate", &json!({"url": url}));
        assert!(answer["errorText"].is_null(), "{url}: {answer}");
        while self.events.borrow().iter().filter(|event| is_load(event)).count() == num_before {
            let event = self.receive();
            self.events.borrow_mut().push(event);
        }
    }

    /// Loads what is open again.
    fn reload(&self) {
        let url = self.text("location.href");
        self.open("about:blank");
        self.open(&url);
    }

    /// Opens the page of a server and waits until the server is ready.
    #[track_caller]
    fn open_ready(&self, server: &Server) {
        self.open(&format!("http://{}/", server.address()));
        self.until_ready();
    }

    /// Waits until the server is ready, what is kept has been read, and one can write.
    #[track_caller]
    fn until_ready(&self) {
        self.until(
            "document.querySelector('#state').textContent === 'Ready' && document.activeElement.id === 'input' && \
             (document.querySelector('#conversations li') || document.querySelector('#no-conversations').textContent)",
        );
    }

    /// The value of an expression, which may be a promise.
    #[track_caller]
    fn eval(&self, expression: &str) -> Value {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let mut answer = self.call("Runtime.evaluate", &params);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].take()
    }

    #[track_caller]
    fn text(&self, expression: &str) -> String {
        let value = self.eval(expression);
        value.as_str().unwrap_or_else(|| panic!("{expression} is {value}")).to_owned()
    }

    /// Waits until an expression is true.
    #[track_caller]
    fn until(&self, condition: &str) {
        self.eval(&format!("({UNTIL})(() => ({condition}))"));
    }

    /// Waits until there are this many messages and the last one is complete.
    #[track_caller]
    fn until_messages(&self, count: usize) {
        self.until(&format!(
            "document.querySelectorAll('.message').length === {count} && \
             document.querySelector('#log').ariaBusy === 'false' && !document.querySelector('#send').hidden && \
             !document.querySelector('textarea[readonly]')"
        ));
        // The page follows what has grown in the next frame.
        self.eval(FRAME);
    }

    /// What the page keeps, the latest conversation first, when nothing is being written.
    #[track_caller]
    fn records(&self) -> Vec<Value> {
        let records = self.eval(&with_store("store.getAll()"));
        let mut records = records.as_array().unwrap().clone();
        records.sort_by_key(|record| -record["updated"].as_i64().unwrap_or(0));
        records
    }

    /// Waits until the latest conversation is kept with this many messages.
    #[track_caller]
    fn until_kept(&self, num_messages: usize) {
        let kept = |records: &[Value]| {
            let messages = records.first().map_or(&[][..], |record| record["messages"].as_array().unwrap());
            messages.len() == num_messages && messages.iter().all(|message| message["growing"].is_null())
        };
        self.until_records(kept, &format!("{num_messages} complete messages are kept"));
    }

    /// Waits until this many conversations are kept: what a page has begun to write or to delete is lost if it is left before.
    #[track_caller]
    fn until_num_kept(&self, num_conversations: usize) {
        let kept = |records: &[Value]| records.len() == num_conversations;
        self.until_records(kept, &format!("{num_conversations} conversations are kept"));
    }

    #[track_caller]
    fn until_records(&self, are_there: impl Fn(&[Value]) -> bool, what: &str) {
        let start = std::time::Instant::now();
        while !are_there(&self.records()) {
            assert!(start.elapsed() < TIMEOUT, "never: {what}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// Puts a record where the page keeps conversations.
    #[track_caller]
    fn put_record(&self, record: &Value) {
        self.eval(&with_store(&format!("store.put({record})")));
    }

    /// Has a field for files take these.
    #[track_caller]
    fn choose_files(&self, selector: &str, paths: &[&std::path::Path]) {
        let root = self.call("DOM.getDocument", &json!({"depth": 0}))["root"]["nodeId"].clone();
        let node = self.call("DOM.querySelector", &json!({"nodeId": root, "selector": selector}));
        self.call("DOM.setFileInputFiles", &json!({"files": paths, "nodeId": node["nodeId"]}));
    }

    /// Types a text where the cursor is, at once.
    fn write(&self, text: &str) {
        self.call("Input.insertText", &json!({"text": text}));
    }

    /// Presses a key: `Enter`, `Shift+Tab`, `Ctrl+k`, a character.
    fn press(&self, key: &str) {
        let (control, key) = key.strip_prefix("Ctrl+").map_or((0, key), |name| (2, name));
        let (shift, name) = key.strip_prefix("Shift+").map_or((0, key), |name| (8, name));
        let (code, text) = match name {
            "Enter" => (13, "\r"),
            "ArrowUp" => (38, ""),
            "Backspace" => (8, ""),
            "?" => (191, "?"),
            "Escape" => (27, ""),
            "Tab" => (9, ""),
            " " => (32, " "),
            letter if control > 0 => (i32::from(letter.to_uppercase().as_bytes()[0]), ""),
            other => panic!("the code of {other} is not known here"),
        };
        let mut params = json!({
            "type": if text.is_empty() { "rawKeyDown" } else { "keyDown" }, "key": name, "code": name,
            "windowsVirtualKeyCode": code, "modifiers": shift | control, "text": text,
        });
        self.call("Input.dispatchKeyEvent", &params);
        params["type"] = json!("keyUp");
        self.call("Input.dispatchKeyEvent", &params);
    }

    /// Clicks in the middle of an element, which must be what the mouse meets there.
    #[track_caller]
    fn click(&self, selector: &str) {
        let position = self.eval(&format!(
            "(async () => {{
                const node = document.querySelector({selector:?});
                await {FRAME};
                node.scrollIntoView({{ block: 'nearest' }});
                await {FRAME};
                const box = node.getBoundingClientRect();
                const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
                const met = document.elementFromPoint(x, y);
                return node.contains(met) ? [x, y] : `at ${{x}}, ${{y}} is ${{met?.outerHTML}}`;
            }})()"
        ));
        assert!(position.is_array(), "{selector} cannot be clicked: {position}");
        for kind in ["mousePressed", "mouseReleased"] {
            let params =
                json!({"type": kind, "x": position[0], "y": position[1], "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", &params);
        }
    }

    fn resize(&self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", &size);
    }

    /// `dark` or `light`, as the system's setting.
    fn prefer(&self, scheme: &str) {
        let feature = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", &json!({"features": feature}));
    }

    /// Seconds of processor time that pages have taken. Unlike a clock it does not count what else the machine does.
    fn processor_time(&self) -> f64 {
        let info = self.call("SystemInfo.getProcessInfo", &json!({}));
        let processes = info["processInfo"].as_array().unwrap().iter();
        let pages = processes.filter(|process| process["type"] == "renderer");
        pages.map(|process| process["cpuTime"].as_f64().unwrap()).sum()
    }

    fn screenshot(&self) -> Vec<u8> {
        let answer = self.call("Page.captureScreenshot", &json!({"format": "png"}));
        from_base64(answer["data"].as_str().unwrap())
    }

    /// What scripts, the policy and the network complained about.
    fn complaints(&self) -> Vec<String> {
        // An answer comes after the events before it.
        self.eval("0");
        let events = self.events.borrow();
        let found = events.iter().filter(|event| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => {
                ["error", "warning", "assert"].contains(&event["params"]["type"].as_str().unwrap())
            }
            Some("Log.entryAdded") => event["params"]["entry"]["level"] != "verbose",
            _ => false,
        });
        found.map(Value::to_string).collect()
    }

    /// Bodies of requests for answers, in order.
    fn sent(&self) -> Vec<Value> {
        let events = self.events.borrow();
        let bodies = events.iter().filter_map(|event| event["params"]["request"]["postData"].as_str());
        let bodies = bodies.map(|body| serde_json::from_str::<Value>(body).unwrap());
        bodies.filter(|body| body["stream"] == true).collect()
    }

    /// The addresses of all requests.
    fn requested(&self) -> Vec<String> {
        let events = self.events.borrow();
        let requests = events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        requests.map(|event| event["params"]["request"]["url"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program, if there is one.
fn chromium() -> Option<String> {
    let named = std::env::var("TINYVLLM_CHROMIUM").ok();
    let usual = ["chromium", "chromium-browser", "google-chrome"].map(str::to_owned);
    let works = |program: &String| {
        let output = Command::new(program).arg("--version").stderr(Stdio::null()).output();
        output.is_ok_and(|output| output.status.success())
    };
    named.into_iter().chain(usual).find(works)
}

fn from_base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = group.iter().fold(0_u32, |bits, byte| bits << 6 | u32::from(digit(*byte)));
        let bits = bits << (6 * (4 - group.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    bytes
}
