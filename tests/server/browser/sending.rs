//! What happens to a message before it is sent: it is counted, and stays where it is if it is too long.

use serde_json::json;

use super::super::client::Server;
use super::Page;
use super::scripted::{Reply, Scripted};

const INPUT: &str = "document.querySelector('#input').value";
const TROUBLE: &str = "document.querySelector('#trouble').textContent";

#[test]
fn a_prompt_that_is_too_long_stays_in_the_field() {
    let Some(page) = Page::start() else { return };
    let server = Server::start("");
    page.open_ready(&server);
    page.write("What is GGUF?");
    page.press("Enter");
    page.until_messages(2);
    page.until_kept(2);
    let long = "word ".repeat(1_100);
    page.write(&long);
    page.press("Enter");
    page.until(&format!("{TROUBLE} !== ''"));
    let trouble = page.text(TROUBLE);
    assert!(trouble.contains("1,024 is the most") && trouble.contains("Shorten it"), "{trouble}");
    assert_eq!(page.eval("document.querySelector('#trouble').getAttribute('role')"), "alert");
    assert_eq!(page.text(INPUT), long);
    assert_eq!(page.eval("document.querySelectorAll('.message').length"), json!(2));
    assert_eq!(page.records()[0]["messages"].as_array().unwrap().len(), 2);
    // A shorter text has no warning any more, and can be sent.
    page.eval("document.querySelector('#input').select()");
    page.write("What is a block?");
    assert_eq!(page.text(TROUBLE), "");
    page.press("Enter");
    page.until_messages(4);
    assert_eq!(page.text(INPUT), "");
    // The same for a message that is rewritten.
    page.click(".user button[aria-label='Edit message']");
    page.eval("document.activeElement.select()");
    page.write(&long);
    page.press("Enter");
    page.until("document.querySelector('.editor .failure').textContent.includes('1,024')");
    assert_eq!(page.text("document.querySelector('.editor textarea').value"), long);
    page.press("Escape");
    page.until_messages(4);
    // Nothing was sent to the model that does not fit.
    assert_eq!(page.sent().len(), 2);
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn what_cannot_be_counted_is_not_lost() {
    let Some(page) = Page::start() else { return };
    let server = Scripted::start("m");
    page.open(&server.url());
    page.until_ready();
    let busy = json!({"error": {"message": "too many"}});
    server.will_count([
        Reply::Status(429, "retry-after: 7\r\n", busy),
        Reply::Status(200, "", json!({"count": 4_000, "max_model_len": 4_096})),
        Reply::Status(404, "", json!({})),
    ]);
    page.write("Hello");
    page.press("Enter");
    page.until(&format!("{TROUBLE} === 'too many Try again in 7 s.'"));
    assert_eq!(page.text(INPUT), "Hello");
    // An answer that is longer than the rest of the context.
    page.eval("Settings.values.max_tokens = 200");
    page.press("Enter");
    page.until(&format!("{TROUBLE}.includes('4,000 tokens and the longest answer (in the settings) 200')"));
    // A server that does not count is asked.
    server.will([Reply::text("Hello.", 3)]);
    page.press("Enter");
    page.until_messages(2);
    assert_eq!(page.eval(&format!("[{INPUT}, {TROUBLE}]")), json!(["", ""]));
}

#[test]
fn a_long_paste_is_attached_and_can_be_written_all_the_same() {
    let Some(page) = Page::start() else { return };
    let server = Scripted::start("m");
    server.will([Reply::text("Read.", 3), Reply::text("Again.", 3)]);
    page.open(&server.url());
    page.until_ready();
    let paste = |text: &str| {
        page.eval(&format!(
            "(() => {{
                const data = new DataTransfer();
                data.setData('text/plain', {});
                const event = new ClipboardEvent('paste', {{ clipboardData: data, bubbles: true, cancelable: true }});
                document.querySelector('#input').dispatchEvent(event);
                return event.defaultPrevented;
            }})()",
            json!(text)
        ))
    };
    let long = "line\n".repeat(1_000);
    assert_eq!(paste("short"), json!(false));
    page.write("Summarise: ");
    assert_eq!(paste(&long), json!(true));
    assert_eq!(page.text("document.querySelector('#files li span').textContent"), "Pasted text 1");
    page.press("Enter");
    page.until_messages(2);
    let content = page.sent()[0]["messages"][0]["content"].as_str().unwrap().to_owned();
    assert!(content.starts_with("File Pasted text 1:\n```\nline\n") && content.ends_with("Summarise:"));
    paste(&long);
    page.click("#toast button");
    assert_eq!(page.text(INPUT), long);
    assert_eq!(page.eval("document.querySelectorAll('#files li').length"), json!(0));
    // A long message of one's own is folded, and opens.
    page.press("Enter");
    page.until_messages(4);
    let height = "[...document.querySelectorAll('.user .text')].at(-1).getBoundingClientRect().height";
    assert!(page.eval(height).as_f64().unwrap() < 220.0);
    page.click(".user:nth-child(3) .unfold");
    assert!(page.eval(height).as_f64().unwrap() > 10_000.0);
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn errors_are_scrolled_into_view() {
    let Some(page) = Page::start() else { return };
    let server = Scripted::start("m");
    let paragraphs = "A paragraph of some words.\n\n".repeat(80);
    let error = json!({"error": {"message": "it failed"}});
    server.will([Reply::text(&paragraphs, 40), Reply::Status(500, "", error)]);
    page.open(&server.url());
    page.until_ready();
    page.write("Go on");
    page.press("Enter");
    page.until_messages(2);
    // A view further up gets a link to the failure of the last answer.
    page.eval("document.querySelector('#scroller').scrollTop = 0");
    page.until("!document.querySelector('#to-end').hidden");
    page.eval(
        "document.querySelector('.message:last-child button[aria-label=\"Regenerate: answer\"]').click()",
    );
    page.until_messages(2);
    page.until(
        "(() => {
            const box = document.querySelector('.failure[role=alert]:not(#trouble)').getBoundingClientRect();
            return box.height > 0 && box.top >= 0 && box.bottom <= document.querySelector('#footer').getBoundingClientRect().top;
        })()",
    );
}
