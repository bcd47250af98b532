//! Information about a process, and how it is stopped.

use tinyvllm::Error;

/// Start time of the process, in a unit of the system. Only Linux has it. It distinguishes two processes with
/// the same id.
#[cfg(target_os = "linux")]
pub(super) fn started(pid: u32) -> Option<u64> {
    let line = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain spaces and parentheses. The third field comes after it.
    let (_, rest) = line.rsplit_once(')')?;
    rest.split_whitespace().nth(22 - 3)?.parse().ok()
}

#[cfg(not(target_os = "linux"))]
pub(super) fn started(_pid: u32) -> Option<u64> {
    None
}

/// Memory of the process in bytes, including mapped files.
pub(crate) fn memory_bytes(pid: u32) -> Option<u64> {
    let kilobytes = if cfg!(target_os = "linux") {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:").map(str::to_owned))?;
        line.split_whitespace().next()?.parse::<u64>().ok()?
    } else if cfg!(unix) {
        let output =
            std::process::Command::new("ps").args(["-o", "rss=", "-p", &pid.to_string()]).output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()?
    } else {
        return None;
    };
    Some(kilobytes * 1_024)
}

/// Asks the process to finish its work and end.
///
/// # Errors
/// If the process does not exist any more, or the system has no such signal.
#[cfg(unix)]
pub(crate) fn send_stop(pid: u32) -> tinyvllm::Result<()> {
    use nix::sys::signal::{Signal, kill};
    let failed = |source: std::io::Error| Error::io(format_args!("cannot stop process {pid}"), source);
    let number = i32::try_from(pid).map_err(|_| Error::internal(format!("{pid} is not a process id")))?;
    kill(nix::unistd::Pid::from_raw(number), Signal::SIGTERM).map_err(|errno| failed(errno.into()))
}

#[cfg(not(unix))]
pub(crate) fn send_stop(pid: u32) -> tinyvllm::Result<()> {
    Err(Error::unsupported("this system has no signal that stops a program").with_hint(format!(
        "press Ctrl-C in the server's window, or end it at once with `taskkill /F /PID {pid}`"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn this_process_takes_memory() {
        let pid = std::process::id();
        assert!(memory_bytes(pid).unwrap() > 1 << 20);
        assert_eq!(started(pid), started(pid));
        assert_eq!(started(pid).is_some(), cfg!(target_os = "linux"));
        assert!(send_stop(u32::MAX).is_err());
    }
}
