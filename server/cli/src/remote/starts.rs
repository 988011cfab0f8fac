//! Command lines as requests to the service: POST /api/v1/runs.

use clap::{ArgMatches, CommandFactory};
use coldrise_block::Result;
use coldrise_requests::refuse;
use serde_json::Value;

use crate::arguments::Arguments;

/// The request for a command line.
///
/// # Errors
/// `InvalidInput` for a command or an option that the service does not run for others.
pub(super) fn request(matches: &ArgMatches) -> Result<Value> {
    let all = Arguments::command();
    let Some((command, found)) =
        matches.subcommand().and_then(|(name, found)| Some((all.find_subcommand(name)?, found)))
    else {
        return Err(refuse("this"));
    };
    coldrise_requests::json(command, found)
}

#[cfg(test)]
mod tests {
    use super::request;
    use crate::arguments::Arguments;
    use clap::CommandFactory;
    use serde_json::json;

    fn of(line: &str) -> coldrise_block::Result<serde_json::Value> {
        let words = std::iter::once("coldrise").chain(line.split(' '));
        request(&Arguments::command().try_get_matches_from(words).unwrap())
    }

    #[test]
    fn a_command_line_becomes_a_request() {
        assert_eq!(
            of("backup web01 vda=raw:/dev/vg/web01").unwrap(),
            json!({"kind": "backup", "machine": "web01", "disks": {"vda": "raw:/dev/vg/web01"}})
        );
        assert_eq!(
            of("backup web01 vda=raw:/dev/vg/web01 --rate 1.5M").unwrap()["rate_bytes_per_second"],
            json!(3 << 19)
        );
        assert_eq!(
            of("unpublish trial --discard").unwrap(),
            json!({"kind": "unpublish", "session": "trial", "discard": true})
        );
        assert_eq!(
            of("prune web01 db01 --keep-last 3 --keep-within 7d").unwrap(),
            json!({"kind": "prune", "machines": ["web01", "db01"],
                "rules": {"keep_last": 3, "keep_within": "7d"}})
        );
        assert_eq!(
            of("--server https://x forget web01/latest").unwrap(),
            json!({"kind": "forget", "addresses": ["web01/latest"]})
        );
        assert_eq!(of("gc").unwrap(), json!({"kind": "gc"}));
        assert_eq!(
            of("recover web01/latest --to libvirt --new-uuid").unwrap(),
            json!({"kind": "recover", "address": "web01/latest", "to": "libvirt", "new_uuid": true})
        );
        assert_eq!(
            of("recover web01/latest --to vcenter:vc01 --host esx1 --host esx2").unwrap(),
            json!({"kind": "recover", "address": "web01/latest", "to": "vcenter:vc01",
                "hosts": ["esx1", "esx2"]})
        );
        assert_eq!(
            of("move live/web01-1 vda=/images/a.qcow2 --rate 200M").unwrap(),
            json!({"kind": "move", "address": "live/web01-1", "targets": ["vda=/images/a.qcow2"],
                "rate_bytes_per_second": 200 << 20})
        );
        assert_eq!(
            of("rollback web01/latest vda=/dev/vg0/web01 --dry-run").unwrap(),
            json!({"kind": "rollback", "address": "web01/latest", "dry_run": true,
                "disks": {"vda": "/dev/vg0/web01"}})
        );
    }

    #[test]
    fn commands_unsupported_over_the_network_are_refused() {
        for line in ["doctor", "repair", "init", "gc --dry-run", "serve nbd", "key list"] {
            let error = of(line).unwrap_err();
            assert!(error.message().contains("not possible over the network"), "{line}: {error}");
        }
    }
}
