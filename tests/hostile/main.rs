//! Attacks on the server as a process: nothing that is sent stops it, and one client that sends little is served next to one
//! that sends as much as it can.
//!
//! `cargo test --release --test hostile -- --nocapture` prints the table. The aim is 5 times as long as alone for
//! the median and 20 for the worst; the bounds in here allow for slow machines with other work alongside.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod attacks;
mod server;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use self::attacks::{BOMBS, LOADS};
use self::server::Server;

/// Servers share two processors: one at a time.
static MACHINE: Mutex<()> = Mutex::new(());

/// Megabytes that the server may have had in memory at most.
const MAX_MEGABYTES: u64 = 1_000;

/// Time for each load, and how many times as long as alone a request may take under it.
const LOAD_TIME: Duration = Duration::from_secs(2);
const MAX_MEDIAN: f64 = 15.0;
const MAX_WORST: f64 = 60.0;
/// Seconds in which `/health` is answered under a load; the aim is a twentieth.
const MAX_HEALTH: f64 = 1.0;

fn one_at_a_time() -> impl Drop {
    MACHINE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

#[test]
fn no_bomb_ends_the_server_or_stays_in_memory() {
    let _turn = one_at_a_time();
    let server = Server::start(&[]);
    let text = server.text();
    let before = server.memory();
    for (name, bomb) in BOMBS {
        let longest = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let bombs: Vec<_> = (0..6)
                .map(|number| {
                    scope.spawn({
                        let server = &server;
                        move || server.send(&bomb(number))
                    })
                })
                .collect();
            while !bombs.iter().all(|bomb| bomb.is_finished()) {
                let start = Instant::now();
                assert_eq!(server.get("/health").0, 200, "{name}");
                longest.fetch_max(start.elapsed().as_millis() as usize, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(20));
            }
            for (status, answer) in bombs.into_iter().map(|bomb| bomb.join().unwrap()) {
                // Nothing at all is right where the other side sends without end.
                assert!(status < 500, "{name}: {answer}");
                assert!(answer.len() < 20_000, "{name} is answered with {} bytes", answer.len());
            }
        });
        println!("{name}: /health {} ms at most, memory {:?}", longest.into_inner(), server.memory());
        assert_eq!(server.text(), text, "{name}");
    }
    let (Some((before, _)), Some((_, peak))) = (before, server.memory()) else { return };
    assert!(peak < MAX_MEGABYTES, "{peak} MB");
    let start = Instant::now();
    loop {
        let now = server.memory().unwrap().0;
        if now <= before + before / 5 + 16 {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{now} MB stay, of {before} before");
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn a_light_client_is_served_alongside_a_heavy_one() {
    let _turn = one_at_a_time();
    let server = Server::start(&["--trust-client-ids"]);
    let mut slow = Vec::new();
    println!(
        "{:28} {:>6} {:>9} {:>7} {:>6} {:>9}",
        "load", "tokens", "alone ms", "median", "worst", "health ms"
    );
    for (name, num_connections, load) in LOADS {
        for &num_tokens in if cfg!(debug_assertions) { &[4, 60][..] } else { &[4, 30, 60, 200] } {
            (0..3).for_each(|_| _ = server.complete(num_tokens));
            let alone = median(&(0..9).map(|_| server.complete(num_tokens)).collect::<Vec<_>>());
            let (took, health) = with_load(&server, *num_connections, *load, num_tokens);
            let (typical, worst) = (median(&took) / alone, took.iter().copied().fold(0.0, f64::max) / alone);
            let (alone, health_ms) = (alone * 1e3, health * 1e3);
            println!("{name:28} {num_tokens:6} {alone:9.1} {typical:7.1} {worst:6.1} {health_ms:9.1}");
            if typical > MAX_MEDIAN || worst > MAX_WORST || health > MAX_HEALTH {
                slow.push(format!(
                    "{name}, {num_tokens} tokens: x{typical:.1}, x{worst:.1} at worst, /health {health_ms:.0} ms"
                ));
            }
        }
    }
    assert!(slow.is_empty(), "a light client takes longer than alone: {slow:#?}");
    // All aborted requests are gone.
    let start = Instant::now();
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") > 0.0 {
        assert!(start.elapsed() < Duration::from_secs(60), "requests are left");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Seconds that completions take one after another while the load lasts, and `/health` between them at most.
fn with_load(
    server: &Server,
    num_connections: usize,
    load: attacks::Attack,
    num_tokens: usize,
) -> (Vec<f64>, f64) {
    let (is_over, number) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..num_connections {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let (status, _) =
                        server.send_until(&load(number.fetch_add(1, Ordering::Relaxed)), &is_over);
                    if status != 200 {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                }
            });
        }
        std::thread::sleep(Duration::from_millis(700));
        let (start, mut took, mut health) = (Instant::now(), Vec::new(), 0.0_f64);
        while start.elapsed() < LOAD_TIME {
            took.push(server.complete(num_tokens));
            let asked = Instant::now();
            assert_eq!(server.get("/health").0, 200);
            health = health.max(asked.elapsed().as_secs_f64());
            std::thread::sleep(Duration::from_millis(50));
        }
        is_over.store(true, Ordering::Relaxed);
        (took, health)
    })
}
