//! What a rendering takes of memory is what its limit says, and not a multiple of it, whatever the template does.
//!
//! The program has one test, because the counter counts for the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use tinyvllm::chat::ChatTemplate;

/// The system's allocator, counting the bytes that are in use, and the most that ever were.
struct Counting;

static NUM_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let before = NUM_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        PEAK.fetch_max(before + layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's guarantees.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NUM_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's guarantees.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What the values of a small conversation may take.
const LIMIT: usize = 64 << 20;

fn repeated(start: &str, step: &str) -> String {
    format!(
        "{{% set ns = namespace(s={start}) %}}{{% for i in range(40) %}}{{% set ns.s = {step} %}}{{% endfor %}}{{{{ ns.s | length }}}}"
    )
}

#[test]
fn a_rendering_stays_within_its_limit() {
    let mut templates: Vec<String> = [
        ("'a'", "ns.s ~ ns.s"),
        ("'a'", "(ns.s + ns.s).casefold()"),
        ("'a'", "ns.s | replace('a', 'aa')"),
        ("'\\x01'", "(ns.s ~ ns.s, ns.s) | string | length and ns.s ~ ns.s"),
        ("'\\x01'", "[ns.s ~ ns.s] | tojson | length and ns.s ~ ns.s"),
        ("'\\x01'", "((ns.s ~ ns.s).encode(),) | string | length and ns.s ~ ns.s"),
        ("[1]", "ns.s + ns.s"),
        ("[1.5]", "(ns.s + ns.s) | sort"),
        ("['x']", "(ns.s + ns.s) | map('upper') | list"),
        ("(1,)", "(ns.s, ns.s, {(ns.s): 1})"),
    ]
    .map(|(start, step)| repeated(start, step))
    .into();
    templates.extend(
        [
            "('a ' * 20000000).split() | length",
            "('a\n' * 20000000).splitlines() | length",
            "('a ' * 20000000) | wordwrap(1) | length",
            "'%.15000000d' % 1",
            "'{:>15000000}'.format('x') | length",
            "range(99999) | map('string') | batch(2) | map('list') | map('join') | unique | list | length",
            "raise_exception('a' * 60000000)",
            "none['a' * 60000000] + none",
        ]
        .map(|expression| format!("{{{{ {expression} }}}}")),
    );
    templates.push("{% for i in range(99999) %}{% for j in range(99) %}{% macro m() %}{{ i }}{% endmacro %}{% endfor %}{% endfor %}".to_owned());
    for source in templates {
        let template = ChatTemplate::new(&source).unwrap();
        let before = NUM_BYTES.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let error = template.render(&json!({})).unwrap_err();
        let taken = PEAK.load(Ordering::Relaxed) - before;
        // A copy of what was paid for is made by the library before it is paid for itself.
        assert!(taken < 2 * LIMIT, "{source}: {taken} bytes ({error})");
        let left = NUM_BYTES.load(Ordering::Relaxed) - before;
        assert!(left < 100_000, "{source}: {left} bytes are left");
    }
}
