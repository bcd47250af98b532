//! What earlier and other processes left of a file that is not complete.

use std::time::SystemTime;

use super::*;

/// The file of a process of another machine.
fn foreign(cache: &TempDir) -> PathBuf {
    repo_dir(cache)
        .join("blobs")
        .join(format!("{}.tinyvllm-00000000-00000000-1x1x0.incomplete", etag(&weights())))
}

fn leave(path: &Path, data: &[u8], age: Duration) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, data).unwrap();
    fs::File::options().write(true).open(path).unwrap().set_modified(SystemTime::now() - age).unwrap();
}

#[track_caller]
fn assert_complete(cache: &TempDir) {
    assert_eq!(fs::read(snapshot(cache).join(WEIGHTS)).unwrap(), weights());
    assert_eq!(incomplete(cache, &weights()), None, "nothing is left next to it");
}

#[test]
fn the_file_of_an_earlier_attempt_is_resumed_or_replaced() {
    let hub = hub_with_a_folder();
    let check = |left: &[u8], expected_ranges: &[&str]| {
        let cache = TempDir::new().unwrap();
        leave(&shared_incomplete(&cache, &weights()), left, Duration::ZERO);
        hub.take_requests();
        get("org/name", &config(&hub, &cache)).unwrap();
        assert_complete(&cache);
        assert_eq!(data_ranges(&hub), expected_ranges, "{} bytes were left", left.len());
    };
    check(&[], &["bytes=0-299999"]);
    check(&weights()[..1], &["bytes=1-299999"]);
    check(&weights()[..299_999], &["bytes=299999-299999"]);
    check(&weights(), &[]);
    check(&[7; 300_001], &["bytes=0-299999"]);
    // Only its checksum shows that these are other bytes.
    check(&[7; 300_000], &["bytes=0-299999"]);
    check(&[7; 1000], &["bytes=1000-299999", "bytes=0-299999"]);
}

#[test]
fn the_file_of_a_dead_process_of_another_machine_is_resumed() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    leave(&foreign(&cache), &weights()[..50_000], Duration::from_secs(301));
    get("org/name", &config(&hub, &cache)).unwrap();
    assert_complete(&cache);
    assert_eq!(data_ranges(&hub), ["bytes=50000-299999"]);
}

/// It may be alive, because locks do not always reach other machines.
#[test]
fn what_another_machine_is_writing_is_left_alone() {
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    leave(&foreign(&cache), &weights()[..50_000], Duration::from_secs(10));
    let path = foreign(&cache);
    hub.set_fault(move |request, _| {
        if is_data(request) {
            assert_eq!(fs::metadata(&path).unwrap().len(), 50_000);
        }
    });
    get("org/name", &config(&hub, &cache)).unwrap();
    assert_complete(&cache);
    assert_eq!(data_ranges(&hub), ["bytes=0-299999"]);
}

#[test]
fn what_is_unused_is_removed() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let (hub, cache) = (hub_with_a_folder(), TempDir::new().unwrap());
    let at = |name: &str| repo_dir(&cache).join("blobs").join(name);
    let (old, newer) = ("old.tinyvllm-1-2-3x4x0.incomplete", "newer.tinyvllm-1-2-3x4x0.incomplete");
    leave(&at(old), b"x", 15 * DAY);
    leave(&at(newer), b"x", 13 * DAY);
    // Of the Python client: it may have its reasons.
    leave(&at("theirs.0123abcd.incomplete"), b"x", 15 * DAY);
    get("org/name", &config(&hub, &cache)).unwrap();
    let left: Vec<_> = names(&repo_dir(&cache).join("blobs"))
        .into_iter()
        .filter(|name| name.contains("incomplete"))
        .collect();
    assert_eq!(left, [newer, "theirs.0123abcd.incomplete"]);
}
