//! Points that are still on their way to this repository, for people and for programs.

use coldrise_inventory::IncomingDetails;
use serde::Serialize;

use crate::report::Report;
use crate::units::{show_moment, show_size};

/// A row of the list of points.
pub(crate) fn row(incoming: &IncomingDetails) -> Vec<String> {
    vec![
        incoming.address.clone(),
        String::new(),
        "coming".to_owned(),
        format!("{} % here", incoming.percent_here),
        String::new(),
        incoming.disks.join(" "),
        show_size(incoming.size_bytes),
        "-".to_owned(),
        String::new(),
        String::new(),
    ]
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    details: &'a IncomingDetails,
    kind: &'static str,
}

/// One point on its way.
pub(crate) fn report(details: &IncomingDetails) -> Report {
    let address = &details.address;
    let mut text = format!(
        "point        {address}\nkind         coming: {} % has arrived\nstored at    {} (at the other site)\n",
        details.percent_here,
        show_moment(details.created_at_ms)
    );
    for (name, size_bytes) in details.disks.iter().zip(&details.disk_sizes_bytes) {
        text.push_str(&format!("disk         {address}/{name}  {}\n", show_size(*size_bytes)));
    }
    let how = match details.is_reachable {
        true => "fetched from the other site when they are read",
        false => {
            "the other site is not connected: reading them gives I/O errors (coldrise forget drops the point)"
        }
    };
    text.push_str(&format!("missing      {}: {how}\n", show_size(details.missing_bytes)));
    Report::answer(&Shown { details, kind: "coming" }, text)
}
