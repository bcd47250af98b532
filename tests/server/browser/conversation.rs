//! The page with the real server: talking, stopping, keys, the keyboard.

use std::thread;
use std::time::Duration;

use serde_json::json;

use super::super::client::Server;
use super::{FRAME, Page};

const RUNNING: &str = "vllm:num_requests_running";
const ABORTED: &str = "vllm:request_success_total{model_name=\"demo\",engine=\"0\",finished_reason=\"abort\"";
const LAST_TEXT: &str = "[...document.querySelectorAll('.assistant .text')].at(-1).textContent";
const LAST_NUMBERS: &str = "[...document.querySelectorAll('.assistant .numbers')].at(-1).textContent";
const LAST_MORE: &str = "[...document.querySelectorAll('.assistant .more span')].at(-1).textContent";

/// `TINYVLLM_SCREENSHOTS=folder` has pictures made, wide and narrow, light and dark. One is in the README.
#[test]
fn a_conversation_of_two_turns() {
    let Some(page) = Page::start() else { return };
    let server = Server::start("");
    page.open_ready(&server);
    page.eval("localStorage.setItem('tinyvllm.settings', '{\"temperature\": 0}')");
    page.open_ready(&server);
    assert_eq!(page.text("document.querySelector('#only-model').textContent"), "demo");
    assert_eq!(
        page.eval("document.querySelector('#model').checkVisibility()"),
        json!(false),
        "there is no choice"
    );
    // The cursor is where one writes.
    assert_eq!(page.text("document.activeElement.id"), "input");
    page.eval(&format!(
        "window.wrote = new Set(), new MutationObserver(() => wrote.add({LAST_TEXT})) \
         .observe(document.querySelector('#log'), {{ childList: true, subtree: true, characterData: true }}), 0"
    ));
    page.write("What is paged attention?");
    page.press("Enter");
    page.until_messages(2);
    let first = page.text(LAST_TEXT);
    assert!(first.contains("blocks"), "{first}");
    let numbers = page.text(LAST_NUMBERS);
    assert!(numbers.contains(" tokens/s") && !numbers.contains("cached"), "{numbers}");
    // Rarely used settings are collapsed.
    let more = page.text(LAST_MORE);
    for part in ["first token after", "0 of ", "prompt tokens cached"] {
        assert!(more.contains(part), "{part} is missing in {more}");
    }
    assert_eq!(page.eval("document.querySelector('.more').open"), json!(false));
    assert_eq!(page.text("document.activeElement.id"), "input");

    page.write("Tell me a story");
    page.press("Shift+Enter");
    page.write("about a lighthouse.");
    assert_eq!(page.text("document.querySelector('#input').value"), "Tell me a story\nabout a lighthouse.");
    page.press("Enter");
    page.until_messages(4);
    // It came in chunks.
    assert!(page.eval("wrote.size").as_u64().unwrap() > 5);
    let numbers = page.text(LAST_MORE);
    let cached = numbers.split(" · ").find_map(|part| part.strip_suffix(" prompt tokens cached")).unwrap();
    let (cached, prompt) = cached.split_once(" of ").unwrap();
    let (cached, prompt): (u32, u32) = (cached.parse().unwrap(), prompt.parse().unwrap());
    assert!(cached >= 32 && cached < prompt, "{numbers}");
    assert!(page.text("document.querySelector('#context').textContent").ends_with("of 1,024 tokens"));

    if let Some(folder) = std::env::var_os("TINYVLLM_SCREENSHOTS") {
        page.eval("document.activeElement.blur()");
        for (width, height, size) in [(1_100, 820, "wide"), (390, 760, "narrow")] {
            page.resize(width, height);
            for scheme in ["light", "dark"] {
                page.prefer(scheme);
                // What follows a change of size follows it in the next frame.
                page.eval(FRAME);
                let path = std::path::Path::new(&folder).join(format!("{size}-{scheme}.png"));
                std::fs::write(path, page.screenshot()).unwrap();
            }
        }
        page.prefer("light");
        page.resize(1_100, 760);
    }

    // It is still there when the page is loaded again, under its address.
    let before = page.text("document.querySelector('#log').innerText");
    page.reload();
    page.until_ready();
    page.until_messages(4);
    assert_eq!(page.text("document.querySelector('#log').innerText"), before);

    // Any message can be regenerated, rewritten and undone.
    page.click(".message:last-child .tools button[aria-label='Regenerate: answer']");
    page.until_messages(4);
    page.click(".user:nth-child(3) .tools button[aria-label='Edit message']");
    assert_eq!(page.text("document.activeElement.ariaLabel"), "Edit message");
    page.eval("document.activeElement.select()");
    page.write("What is GGUF?");
    page.press("Enter");
    page.until_messages(4);
    assert_eq!(page.text("document.querySelectorAll('.user .text')[1].textContent"), "What is GGUF?");
    page.click(".user:nth-child(3) button[aria-label='Delete message and what follows']");
    // The version before it is shown again.
    page.until_messages(4);
    assert_eq!(
        page.text("document.querySelectorAll('.user .text')[1].textContent"),
        "Tell me a story\nabout a lighthouse."
    );
    page.click(".user:nth-child(3) button[aria-label='Delete message and what follows']");
    page.until_messages(2);
    assert_eq!(page.text(LAST_TEXT), first);
    page.click("#new-chat");
    page.until("!document.querySelector('.message') && location.hash === ''");

    assert_eq!(page.complaints(), Vec::<String>::new());
    let own = format!("http://{}/", server.address());
    let outside = |url: &String| !url.starts_with(&own) && !url.starts_with("data:image/svg");
    assert_eq!(page.requested().into_iter().find(outside), None);
}

#[test]
fn an_answer_is_stopped_in_the_server_too() {
    let Some(page) = Page::start() else { return };
    // Slow enough that no answer ends by itself before it is stopped.
    let server = Server::start("--kernels reference");
    page.open_ready(&server);
    for (number, stop) in ["Escape", "#stop"].into_iter().enumerate() {
        page.write("Tell me a long story about a dragon.");
        page.press("Enter");
        page.until(&format!("{LAST_TEXT} !== '' && !document.querySelector('#stop').hidden"));
        match stop {
            "Escape" => page.press("Escape"),
            selector => page.click(selector),
        }
        page.until_messages(2 * (number + 1));
        assert!(page.text(LAST_NUMBERS).starts_with("stopped"));
        assert_eq!(page.text("document.activeElement.id"), "input");
        server.wait_for_metric(RUNNING, 0.0);
        server.wait_for_metric(ABORTED, (number + 1) as f64);
    }
    // What was said before the stop is part of the conversation.
    page.write("Thank you.");
    page.press("Enter");
    page.until_messages(6);
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn settings_reach_the_server() {
    let Some(page) = Page::start() else { return };
    let server = Server::start("--served-model-name first --served-model-name second");
    page.open_ready(&server);
    page.eval(
        "document.querySelector('#model').value = 'second'; \
        document.querySelector('#model').dispatchEvent(new Event('change')), 0",
    );
    assert_eq!(page.eval("document.querySelector('#model').checkVisibility()"), json!(true));
    page.click("#open-settings");
    // The model's own values are there as numbers.
    page.until("document.querySelector('#sampling-temperature').placeholder !== 'default'");
    let preferred = server.get("/model_info").success()["preferred_sampling_params"].clone();
    for name in ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"] {
        let shown = page.text(&format!("document.querySelector('#sampling-{name}').placeholder"));
        assert_eq!(shown.parse::<f64>().unwrap(), preferred[name].as_f64().unwrap(), "{name}");
    }
    for (name, value) in [("temperature", "0"), ("max_tokens", "3"), ("top_p", "7"), ("seed", "12")] {
        page.eval(&format!("document.querySelector('#sampling-{name}').focus()"));
        page.write(value);
    }
    page.eval("document.querySelector('#system').focus()");
    page.write("You are brief.");
    page.press("Escape");
    page.eval("document.querySelector('#input').focus()");
    page.write("Hello");
    page.press("Enter");
    page.until_messages(2);
    let numbers = page.text(LAST_NUMBERS);
    assert!(
        numbers.starts_with("3 tokens") && numbers.ends_with("cut off at the longest length"),
        "{numbers}"
    );
    let sent = page.sent().remove(0);
    assert_eq!(sent["model"], "second");
    assert_eq!(sent["messages"][0], json!({"role": "system", "content": "You are brief."}));
    let sampling = [&sent["temperature"], &sent["max_tokens"], &sent["seed"]];
    assert_eq!(sampling, [&json!(0), &json!(3), &json!(12)]);
    // A value out of its range is marked and not sent.
    assert!(sent.get("top_p").is_none());
    assert!(page.eval("document.querySelector('#sampling-top_p').matches(':invalid')").as_bool().unwrap());
    assert_eq!(
        page.text("document.querySelector('#trouble-top_p').textContent"),
        "A number from 0 to 1. The default is used."
    );
    assert_eq!(page.text("document.querySelector('#trouble-seed').textContent"), "");
}

#[test]
fn a_key_is_asked_for_and_forgotten_with_the_tab() {
    let Some(page) = Page::start() else { return };
    let server = Server::start("--api-key secret");
    page.open(&format!("http://{}/", server.address()));
    page.until("document.querySelector('#key-dialog').open");
    assert_eq!(page.text("document.activeElement.id"), "key");
    assert!(
        page.text("document.querySelector('#key-dialog').textContent").contains("It works like a password")
    );
    assert!(page.eval("document.querySelector('#key-reason').hidden").as_bool().unwrap());
    page.press("Escape");
    page.until("document.querySelector('#state').textContent === 'Needs a key'");
    // A draft is kept after a confirmation.
    page.write("What is GGUF?");
    page.press("Enter");
    page.until("document.querySelector('#key-dialog').open");
    page.write("wrong");
    page.press("Enter");
    page.until(
        "document.querySelector('#key-reason').textContent === 'The server did not take this key: the API \
                key is not valid.'",
    );
    page.until("document.querySelector('#key-dialog').open && document.querySelector('#key').value === ''");
    page.write("secret");
    page.press("Enter");
    page.until_messages(2);
    assert!(page.text(LAST_TEXT).contains("GGUF"));
    let kept = "[sessionStorage.getItem('tinyvllm.key'), JSON.stringify(localStorage).includes('secret')]";
    assert_eq!(page.eval(kept), json!(["secret", false]));
    page.open_ready(&server);
    assert!(!page.eval("document.querySelector('#key-dialog').open").as_bool().unwrap());
}

#[test]
fn everything_is_reached_by_keyboard() {
    let Some(page) = Page::start() else { return };
    let server = Server::start("");
    page.open_ready(&server);
    page.write("Hello");
    page.press("Enter");
    page.until_messages(2);
    page.eval("document.activeElement.blur()");
    let mut reached = Vec::new();
    for _ in 0..40 {
        page.press("Tab");
        let focused = || {
            page.text(
            "(() => {
                const node = document.activeElement;
                if (node === document.body) return 'body';
                const style = getComputedStyle(node);
                const ring = getComputedStyle(node.closest('#composer') ?? node).borderColor;
                const isShown = style.outlineStyle !== 'none' || node.id === 'input';
                return (isShown ? '' : 'unmarked ') + (node.id || node.ariaLabel || node.textContent) + (ring ? '' : '?');
            })()",
        )
        };
        // On a busy machine the focus may be drawn a moment later.
        let is_marked = |name: &String| !name.starts_with("unmarked");
        let name = (0..20)
            .map(|tries| {
                thread::sleep(Duration::from_millis(10 * tries));
                focused()
            })
            .find(is_marked)
            .unwrap_or_else(focused);
        if reached.contains(&name) {
            break;
        }
        reached.push(name);
    }
    for name in [
        "toggle-list",
        "new-chat",
        "open-settings",
        "open-panel",
        "search",
        "Hello",
        "Rename Hello",
        "Delete Hello",
        "import",
        "export",
        "attach",
        "theme",
        "Copy message",
        "Edit message",
        "Regenerate: answer",
        "input",
        "send",
    ] {
        assert!(reached.iter().any(|found| found == name), "{name} is not among {reached:?}");
    }
    assert!(!reached.iter().any(|name| name.starts_with("unmarked")), "{reached:?}");
    // A dialog takes the cursor and gives it back.
    page.eval("document.querySelector('#open-settings').focus()");
    page.press("Enter");
    page.until("document.querySelector('#settings').open");
    page.press("Escape");
    page.until("!document.querySelector('#settings').open");
    assert_eq!(page.text("document.activeElement.id"), "open-settings");
    // Enter that ends a composition sends nothing.
    page.eval("document.querySelector('#input').focus()");
    page.call("Input.imeSetComposition", &json!({"text": "か", "selectionStart": 1, "selectionEnd": 1}));
    page.eval(
        "document.querySelector('#input').dispatchEvent(new KeyboardEvent('keydown', \
        { key: 'Enter', isComposing: true, bubbles: true, cancelable: true })), 0",
    );
    page.write("か");
    assert_eq!(
        page.eval("[document.querySelector('#input').value, document.querySelectorAll('.message').length]"),
        json!(["か", 2])
    );
}
