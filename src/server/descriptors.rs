//! The limit of open files, and the limits of connections that follow from it.
//!
//! A connection is an open file. A process at its limit can neither accept a connection nor read a file.
//! Shells and service managers often set a low limit and allow a higher one, so the server raises it as far
//! as it needs. If that is not enough, the server lowers its limits of connections, so that some descriptors
//! remain for files and for `/health`.

use super::ServerConfig;
use super::connection::RESERVE;
use super::kv_events::MAX_PEERS;
use tinyvllm::{Error, Result};

/// Descriptors for other files: of the model, of the device, of what reads them; and for connections that are
/// being refused.
const SPARE: usize = 128;
/// The smallest such number with which the server starts.
const MIN_SPARE: usize = 16;
/// The smallest limit for each kind of connection.
const MIN_CONNECTIONS: usize = 4;

/// How the open files are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DescriptorBudget {
    /// Connections, in all and from one address.
    pub(super) connections: usize,
    pub(super) per_address: usize,
    /// Connections beyond these, for monitoring.
    pub(super) reserve: usize,
    /// Peers of the KV events.
    pub(super) peers: usize,
}

/// The limit of open files, and what fits into it.
#[derive(Debug, Clone)]
pub(super) struct Descriptors {
    pub(super) budget: DescriptorBudget,
    /// The limit of the process, if the system has one.
    pub(super) limit: Option<usize>,
    /// A notice for the operator.
    pub(super) notice: Option<String>,
}

impl Descriptors {
    /// Raises the limit as far as needed and allowed, and divides it.
    ///
    /// # Errors
    /// If there are too few for the server to start.
    pub(super) fn of(config: &ServerConfig) -> Result<Self> {
        let wanted = DescriptorBudget {
            connections: config.max_connections,
            per_address: config.max_connections_per_address,
            reserve: RESERVE,
            peers: if config.kv_events.is_some() { MAX_PEERS } else { 0 },
        };
        let num_open = system::num_open();
        let Some(limit) = system::raise_limit(wanted.num_files(num_open)) else {
            return Ok(Self { budget: wanted, limit: None, notice: None });
        };
        let budget = wanted.within(limit, num_open).ok_or_else(|| {
            let least = wanted.least(num_open);
            Error::invalid_request(format!(
                "this process may have {limit} open files (ulimit -n); a server needs at least {least}"
            ))
            .with_hint(format!("allow more, for instance with ulimit -n {}", wanted.num_files(num_open)))
        })?;
        let notice = (budget != wanted).then(|| {
            let DescriptorBudget { connections, per_address, .. } = budget;
            let peers = match budget.peers {
                0 => String::new(),
                peers => format!(", and {peers} peers of the KV events"),
            };
            format!(
                "this process may have {limit} open files (ulimit -n), so there are at most {connections} \
                 connections at once, {per_address} from one address{peers}; the requested limits need {}",
                wanted.num_files(num_open)
            )
        });
        Ok(Self { budget, limit: Some(limit), notice })
    }
}

impl DescriptorBudget {
    /// Number of open files when all of this is in use, with this many open already.
    fn num_files(&self, num_open: usize) -> usize {
        let kinds = [num_open, SPARE, self.reserve, self.peers];
        kinds.into_iter().fold(self.connections, usize::saturating_add)
    }

    /// The fewest open files with which the server starts.
    fn least(&self, num_open: usize) -> usize {
        let num_kinds = if self.peers > 0 { 3 } else { 2 };
        num_open + MIN_SPARE + num_kinds * MIN_CONNECTIONS
    }

    /// Reduces it to what fits; `None` if that is too little for a server.
    fn within(self, limit: usize, num_open: usize) -> Option<Self> {
        if self.num_files(num_open) <= limit {
            return Some(self);
        }
        if limit < self.least(num_open) {
            return None;
        }
        let left = limit - num_open;
        let left = left - (left / 4).clamp(MIN_SPARE, SPARE);
        let reserve = (left / 8).clamp(MIN_CONNECTIONS, self.reserve);
        let peers = (left / 4).max(MIN_CONNECTIONS).min(self.peers);
        let connections = (left - reserve - peers).min(self.connections);
        // One address gets at most a third of the reduced number, so that two leave as many for others, unless
        // it may have all connections, as a proxy does.
        let most = if self.per_address >= self.connections { connections } else { connections / 3 };
        let per_address = self.per_address.min(most);
        Some(Self { connections, per_address, reserve, peers })
    }
}

#[cfg(unix)]
mod system {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    /// Files that are open now.
    pub(super) fn num_open() -> usize {
        const USUAL: usize = 16;
        // The directory itself is open while it is read.
        std::fs::read_dir("/dev/fd").map_or(USUAL, |files| files.count().saturating_sub(1))
    }

    /// Raises the limit to this many, if it is lower and may be raised. Returns the resulting limit, if there
    /// is one.
    pub(super) fn raise_limit(wanted: usize) -> Option<usize> {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
        let wanted = u64::try_from(wanted).unwrap_or(u64::MAX).min(hard);
        // If the system refuses, the lower limit stays.
        let raised = wanted > soft && setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).is_ok();
        Some(usize::try_from(if raised { wanted } else { soft }).unwrap_or(usize::MAX))
    }
}

#[cfg(not(unix))]
mod system {
    pub(super) fn num_open() -> usize {
        0
    }

    pub(super) fn raise_limit(_wanted: usize) -> Option<usize> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: DescriptorBudget =
        DescriptorBudget { connections: 4_096, per_address: 1_024, reserve: 64, peers: 256 };

    #[test]
    fn whatever_the_limit_all_kinds_of_connections_and_files_fit() {
        assert_eq!(WANTED.within(4_096 + 64 + 256 + 128 + 9, 9), Some(WANTED));
        assert_eq!(WANTED.within(8, 9), None);
        for wanted in [
            WANTED,
            DescriptorBudget { peers: 0, ..WANTED },
            DescriptorBudget { connections: 4, per_address: 9, ..WANTED },
        ] {
            for num_open in [3, 40] {
                for limit in wanted.least(num_open)..5_000 {
                    let budget = wanted.within(limit, num_open).unwrap();
                    let DescriptorBudget { connections, per_address, reserve, peers } = budget;
                    let num_files = num_open + MIN_SPARE + connections + reserve + peers;
                    assert!(num_files <= limit, "{limit}: {budget:?}");
                    assert!(connections >= MIN_CONNECTIONS && reserve >= MIN_CONNECTIONS, "{budget:?}");
                    assert!(per_address >= 1 && (peers > 0) == (wanted.peers > 0), "{budget:?}");
                    let may_have_all = wanted.per_address >= wanted.connections;
                    assert_eq!(per_address >= connections, may_have_all, "{budget:?}");
                    assert!(may_have_all || 2 * per_address < connections, "{budget:?}");
                }
                assert_eq!(wanted.within(wanted.least(num_open) - 1, num_open), None);
            }
        }
        let budget = WANTED.within(1_024, 10).unwrap();
        assert_eq!(budget, DescriptorBudget { connections: 601, per_address: 200, reserve: 64, peers: 221 });
    }
}
