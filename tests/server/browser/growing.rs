//! Answers while they grow: kept, seen by other tabs, broken off and gone on with.

use serde_json::json;

use super::super::client::Server;
use super::scripted::{Reply, start};
use super::{Page, TIMEOUT};

const TEXTS: &str = "[...document.querySelectorAll('.message .text')].map((each) => each.textContent)";
const STATE: &str = "[...document.querySelectorAll('.assistant')].map((each) => [each.querySelector('.text').textContent, \
    each.querySelector('.ended')?.textContent.startsWith('Broken off') ?? false, \
    [...each.querySelectorAll('.foot .tools > button')].map((button) => button.textContent)])";

fn content(text: &str) -> serde_json::Value {
    json!({"content": text})
}

impl Page {
    /// Waits until this text is kept of the last message of the latest conversation.
    #[track_caller]
    fn until_text_kept(&self, text: &str) {
        let is_kept = |records: &[serde_json::Value]| {
            let messages = records.first().and_then(|record| record["messages"].as_array());
            messages.and_then(|messages| messages.last()).is_some_and(|message| message["content"] == text)
        };
        self.until_records(is_kept, &format!("{text} is kept"));
    }
}

#[test]
fn a_reload_in_the_middle_of_an_answer_loses_nothing() {
    let Some((page, server)) = start(&[]) else { return };
    let begun = vec![content("It was "), content("a dark")];
    server.will([Reply::Held(begun, vec![content(" never seen")])]);
    page.write("Tell me a story");
    page.press("Enter");
    page.until(&format!("({TEXTS})[1] === 'It was a dark'"));
    // Nothing more comes, and it is kept anyway.
    page.until_text_kept("It was a dark");
    page.reload();
    page.until_ready();
    page.until_messages(2);
    let tools = json!(["Copy", "Continue", "Regenerate", "Edit"]);
    assert_eq!(page.eval(STATE), json!([["It was a dark", true, tools]]));
    page.until_kept(2);

    // It is gone on with instead.
    server.will([Reply::Deltas(vec![content(" and stormy"), content(" night.")])]);
    page.click("button[aria-label='Continue: answer']");
    page.until(&format!("({TEXTS})[1] === 'It was a dark and stormy night.'"));
    page.until_messages(2);
    page.until_kept(2);
    let sent = page.sent().remove(1);
    assert_eq!(sent["messages"][1], json!({"role": "assistant", "content": "It was a dark"}));
    assert_eq!(
        [&sent["continue_final_message"], &sent["add_generation_prompt"]],
        [&json!(true), &json!(false)]
    );
    let whole = json!([["It was a dark and stormy night.", false, ["Copy", "Regenerate", "Edit"]]]);
    assert_eq!(page.eval(STATE), whole);
    page.reload();
    page.until_ready();
    page.until_messages(2);
    assert_eq!(page.eval(STATE), whole);
    // Or another one is given.
    server.will([Reply::text("Once.", 9)]);
    page.click("button[aria-label='Regenerate: answer']");
    page.until(&format!("({TEXTS})[1] === 'Once.'"));
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn what_is_kept_of_a_growing_answer_is_at_most_a_second_old() {
    let Some((page, server)) = start(&[]) else { return };
    server.will([Reply::Held(vec![content("one")], vec![content(" two")])]);
    page.write("Count");
    page.press("Enter");
    page.until_text_kept("one");
    let start = std::time::Instant::now();
    server.release();
    page.until_text_kept("one two");
    // A second, and a margin for a busy machine.
    assert!(start.elapsed() < TIMEOUT / 5, "{:?}", start.elapsed());
}

#[test]
fn another_tab_sees_an_answer_grow() {
    let Some((mut page, server)) = start(&[]) else { return };
    let begun = vec![content("It was "), content("a dark")];
    server.will([Reply::Held(begun, vec![content(" night.")])]);
    page.write("Tell me a story");
    page.press("Enter");
    page.until_text_kept("It was a dark");
    let address = page.text("location.href");
    let first = page.session.clone();
    page.session = page.new_tab();
    page.open(&address);
    page.until(&format!("({TEXTS})[1] === 'It was a dark'"));
    // The first tab says that it is at it: nothing is broken off, and nothing can be sent meanwhile.
    page.eval("window.row = document.querySelector('#conversations button')");
    page.eval("new Promise((resolve) => setTimeout(resolve, 1500))");
    // What is kept again and again takes no button away from under the mouse.
    assert_eq!(page.eval("row === document.querySelector('#conversations button')"), json!(true));
    assert_eq!(page.eval(STATE), json!([["It was a dark", false, []]]));
    assert_eq!(page.eval("document.querySelector('#stop').hidden"), json!(false));
    assert_eq!(page.eval("document.querySelectorAll('#conversations .growing').length"), json!(1));
    server.release();
    page.until_messages(2);
    assert_eq!(page.eval(STATE)[0][0], "It was a dark night.");
    page.until_kept(2);

    // The other way round, with an answer that breaks off.
    page.eval("document.querySelector('#input').focus()");
    server.will([Reply::Bytes("data: {\"choices\": [{\"delta\": {\"content\": \"Well\"}}]}\n\n".to_owned())]);
    page.write("And then?");
    page.press("Enter");
    page.until_messages(4);
    assert_eq!(page.eval(&format!("({STATE})[1][2]")), json!(["Copy", "Continue", "Try again", "Edit"]));
    page.session = first;
    page.call("Page.bringToFront", &json!({}));
    page.until_messages(4);
    assert_eq!(page.eval(&format!("({TEXTS})[3]")), "Well");
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn an_answer_that_grows_elsewhere_is_stopped_from_here() {
    let Some(mut page) = Page::start() else { return };
    // Slow enough that no answer ends by itself before it is stopped.
    let server = Server::start("--kernels reference");
    page.open_ready(&server);
    page.write("Tell me a long story about a dragon.");
    page.press("Enter");
    page.until("(document.querySelector('.assistant .text')?.textContent ?? '') !== ''");
    let address = page.text("location.href");
    page.session = page.new_tab();
    page.open(&address);
    page.until("(document.querySelector('.assistant .text')?.textContent ?? '') !== '' && !document.querySelector('#stop').hidden");
    page.click("#stop");
    page.until_messages(2);
    server.wait_until_idle();
    // And it continues where it stopped.
    let before = page.text("document.querySelector('.assistant .text').textContent");
    page.click("button[aria-label='Continue: answer']");
    page.until(&format!(
        "document.querySelector('.assistant .text').textContent.length > {}",
        before.len() + 20
    ));
    page.click("#stop");
    page.until_messages(2);
    assert!(page.text("document.querySelector('.assistant .text').textContent").starts_with(&before));
    assert_eq!(page.complaints(), Vec::<String>::new());
}

#[test]
fn a_tab_that_is_gone_leaves_no_answer_that_seems_to_grow() {
    let Some((mut page, server)) = start(&[]) else { return };
    server.will([Reply::Held(vec![content("Half")], Vec::new())]);
    page.write("Go on");
    page.press("Enter");
    page.until_text_kept("Half");
    let address = page.text("location.href");
    let first = std::mem::take(&mut page.session);
    page.session = page.new_tab();
    page.open(&address);
    page.until(&format!("({TEXTS})[1] === 'Half'"));
    let second = std::mem::replace(&mut page.session, first);
    page.open("about:blank");
    page.session = second;
    page.until_messages(2);
    assert_eq!(page.eval(&format!("({STATE})[0][1]")), true);
}

#[test]
fn a_draft_survives_a_reload() {
    let Some((page, server)) = start(&[]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.txt");
    std::fs::write(&path, "what is attached").unwrap();
    page.choose_files("#file", &[&path]);
    page.until("document.querySelectorAll('#files li').length === 1");
    page.write("Half a\nthought");
    page.reload();
    page.until_ready();
    let draft = "[document.querySelector('#input').value, document.querySelector('#files').textContent]";
    assert_eq!(page.eval(draft), json!(["Half a\nthought", "a.txt✕"]));
    server.will([Reply::text("Yes.", 4), Reply::text("No.", 4)]);
    page.press("Enter");
    page.until_messages(2);
    assert!(page.sent()[0]["messages"][0]["content"].as_str().unwrap().contains("what is attached"));
    // Each conversation has its own.
    page.write("For later");
    page.click("#new-chat");
    assert_eq!(page.eval(draft), json!(["", ""]));
    page.click("#conversations .name");
    assert_eq!(page.eval(draft), json!(["For later", ""]));
    page.eval("document.querySelector('#input').focus()");
    page.press("Enter");
    page.until_messages(4);
    page.reload();
    page.until_ready();
    assert_eq!(page.eval(draft), json!(["", ""]));
    // So has a message that is being rewritten.
    let editor = "document.querySelector('.editor textarea').value";
    for begun in ["a", "ab"] {
        page.click(".user:nth-child(3) button[aria-label='Edit message']");
        page.eval("document.activeElement.setSelectionRange(0, 0)");
        page.write(begun);
        page.reload();
        page.until_ready();
        page.until_messages(4);
    }
    page.click(".user:nth-child(3) button[aria-label='Edit message']");
    assert_eq!(page.text(editor), "abaFor later");
    page.press("Escape");
    page.click(".user:nth-child(3) button[aria-label='Edit message']");
    assert_eq!(page.text(editor), "For later");
    assert_eq!(page.complaints(), Vec::<String>::new());
}
