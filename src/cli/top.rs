//! `tinyvllm top`: watches a running server through its metrics.
//!
//! The metrics have vLLM's names, so it works for vLLM's servers too. Rates and latencies are those of the
//! last interval, from the difference of two pages ([`snapshot`]), and not means since the server's start.

mod keys;
mod prometheus;
mod readings;
mod snapshot;
mod terminal;
mod view;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use tinyvllm::{Error, ErrorKind};

use self::keys::Keys;
use self::readings::Readings;
use self::snapshot::Snapshot;
use self::terminal::Terminal;
use self::view::{History, Screen, one_line};
use super::console::{has_styles, print_error};
use super::http::{HttpClient, read_success};
use super::value::parse_interval;

/// Size limit of a page of metrics.
const MAX_PAGE_BYTES: usize = 16 << 20;
/// Time for a server to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The server to watch.
#[derive(Debug, Clone, Args)]
pub(crate) struct TopArgs {
    /// The server
    #[arg(long, visible_alias = "base-url", default_value = "http://127.0.0.1:8000", value_name = "URL")]
    url: String,
    /// Key of the server [default: OPENAI_API_KEY of the environment]
    #[arg(long, value_name = "KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Interval in seconds
    #[arg(long, default_value = "1", value_name = "S", value_parser = parse_interval)]
    interval: Duration,
    /// Measure one interval, print it, and exit
    #[arg(long)]
    once: bool,
    /// Print a JSON object for each interval
    #[arg(long)]
    json: bool,
}

/// The output format.
enum Output {
    Screen { terminal: Terminal, keys: Keys, is_paused: bool },
    Lines,
    Json,
}

/// Watches until Ctrl-C, or for one interval.
///
/// # Errors
/// With `--once`, if the server does not answer; otherwise only if the output fails.
pub(crate) fn run(args: &TopArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the client")?;
    let key = args.api_key.clone().or_else(|| std::env::var("OPENAI_API_KEY").ok());
    let client = HttpClient::new(&args.url, key.as_deref().filter(|key| !key.is_empty()))?;
    runtime.block_on(async {
        match args.once {
            true => once(args, &client).await,
            false => {
                tokio::select! {
                    result = watch(args, &client) => result,
                    // Dropping the other branch restores the terminal.
                    () = should_end() => Ok(ExitCode::SUCCESS),
                }
            }
        }
    })
}

async fn once(args: &TopArgs, client: &HttpClient) -> anyhow::Result<ExitCode> {
    let before = look(client).await?;
    let start = Instant::now();
    tokio::time::sleep(args.interval).await;
    let after = look(client).await?;
    let readings = Readings::between(&before, &after, start.elapsed());
    let mut output = io::stdout().lock();
    if args.json {
        writeln!(output, "{}", readings.json(client.base_url()))?;
    } else {
        let mut history = History::default();
        history.push(Some(&readings));
        let screen = Screen { url: client.base_url(), readings: &readings, problem: None, history: &history };
        let (width, _) = Terminal::size();
        let width = if io::stdout().is_terminal() { width } else { width.max(80) };
        for line in screen.lines(width, usize::MAX, has_styles(&io::stdout())) {
            writeln!(output, "{}", line.trim_end())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn watch(args: &TopArgs, client: &HttpClient) -> anyhow::Result<ExitCode> {
    let mut output = match (args.json, io::stdout().is_terminal()) {
        (true, _) => Output::Json,
        (false, true) => {
            Output::Screen { terminal: Terminal::enter()?, keys: Keys::listen(), is_paused: false }
        }
        (false, false) => Output::Lines,
    };
    let mut history = History::default();
    let mut readings = Readings::default();
    let mut before: Option<(Snapshot, Instant)> = None;
    let mut problem: Option<String> = None;
    let mut resized = Resizes::new()?;
    let mut ticks = tokio::time::interval(args.interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let looked = look(client).await;
                let now = Instant::now();
                match looked {
                    Ok(after) => {
                        problem = None;
                        // The first page, and the first one after a failure, has no predecessor to compare
                        // with.
                        let (earlier, interval) = match &before {
                            Some((earlier, time)) => (earlier, now.duration_since(*time)),
                            None => (&after, Duration::ZERO),
                        };
                        readings = Readings::between(earlier, &after, interval);
                        if before.is_some() {
                            history.push(Some(&readings));
                            print(&output, client, &readings)?;
                        }
                        before = Some((after, now));
                    }
                    Err(error) => {
                        history.push(None);
                        before = None;
                        let error = error.context("no answer, retrying");
                        // The screen shows the error itself; the log gets only the first one.
                        if problem.is_none() && !matches!(output, Output::Screen { .. }) {
                            print_error(&error);
                        }
                        problem = Some(format!("{}", error.root_cause()));
                    }
                }
            }
            () = resized.next() => {}
            key = output.key() => match (key, &mut output) {
                (b'q' | b'Q', _) => return Ok(ExitCode::SUCCESS),
                (b' ' | b'p', Output::Screen { is_paused, .. }) => *is_paused = !*is_paused,
                _ => {}
            }
        }
        if let Output::Screen { terminal, is_paused: false, .. } = &mut output {
            let (width, height) = Terminal::size();
            let screen = Screen {
                url: client.base_url(),
                readings: &readings,
                problem: problem.as_deref(),
                history: &history,
            };
            terminal.draw(&screen.lines(width, height, has_styles(&io::stdout())))?;
        }
    }
}

impl Output {
    /// The next key. Without a screen it waits forever.
    async fn key(&mut self) -> u8 {
        match self {
            Self::Screen { keys, .. } => keys.next().await,
            Self::Lines | Self::Json => std::future::pending().await,
        }
    }
}

fn print(output: &Output, client: &HttpClient, readings: &Readings) -> io::Result<()> {
    match output {
        Output::Screen { .. } => Ok(()),
        Output::Lines => writeln!(io::stdout(), "{}", one_line(readings)),
        Output::Json => writeln!(io::stdout(), "{}", readings.json(client.base_url())),
    }
}

/// Reads the server's current metrics.
async fn look(client: &HttpClient) -> anyhow::Result<Snapshot> {
    let page = async { read_success(client.get("/metrics").await?, MAX_PAGE_BYTES).await };
    let page = match tokio::time::timeout(TIMEOUT, page).await {
        Ok(page) => page,
        Err(_) => Err(anyhow::anyhow!("no answer within {} s", TIMEOUT.as_secs())),
    };
    let url = client.base_url();
    let page = page.map_err(|error| {
        let message = format!("cannot read {url}/metrics: {error:#}");
        let hint = "give the server's address with --url, and its key, if it has one, with --api-key";
        Error::new(ErrorKind::Unavailable, message).with_hint(hint)
    })?;
    let snapshot = Snapshot::parse(&String::from_utf8_lossy(&page));
    let is_ours = |page: &Snapshot| !Readings::between(page, page, Duration::ZERO).is_empty();
    let Some(snapshot) = snapshot.filter(is_ours) else {
        let message = format!("{url}/metrics has no metrics of a model server");
        return Err(Error::new(ErrorKind::Unsupported, message).into());
    };
    Ok(snapshot)
}

/// Waits for Ctrl-C or another signal that ends a program.
async fn should_end() {
    let ctrl_c = async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let [terminate, hangup, quit] =
            [SignalKind::terminate(), SignalKind::hangup(), SignalKind::quit()].map(signal);
        let (Ok(mut terminate), Ok(mut hangup), Ok(mut quit)) = (terminate, hangup, quit) else {
            return ctrl_c.await;
        };
        tokio::select! {
            () = ctrl_c => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
            _ = quit.recv() => {}
        }
    }
    #[cfg(not(unix))]
    ctrl_c.await;
}

/// Notifies about a new size of the terminal.
struct Resizes {
    #[cfg(unix)]
    signal: tokio::signal::unix::Signal,
}

impl Resizes {
    fn new() -> io::Result<Self> {
        Ok(Self {
            #[cfg(unix)]
            signal: tokio::signal::unix::signal(tokio::signal::unix::SignalKind::window_change())?,
        })
    }

    async fn next(&mut self) {
        #[cfg(unix)]
        self.signal.recv().await;
        // On other systems, the next interval notices the new size.
        #[cfg(not(unix))]
        std::future::pending::<()>().await;
    }
}
