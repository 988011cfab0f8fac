//! `coldrise link`: pairs this repository with one at another site.

use clap::{Args, Subcommand, ValueEnum};
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_inventory::MachinePattern;
use coldrise_line::{PairingCode, pair_with};
use coldrise_replica::{
    CopyRecords, CopyTarget, Link, Links, Right, StatusReader, TargetCopies, parse_link_name,
    parse_prefix,
};
use coldrise_store::MachineName;
use serde::Serialize;
use serde_json::json;

use super::copies::age;
use crate::invocation::Invocation;
use crate::report::{Report, table};
use crate::units::now_ms;

/// Pair this repository with one at another site.
///
/// At the site that others can reach: coldrise link invite NAME, while coldrise serve replica runs. It shows a code. At the
/// other site: coldrise link add NAME HOST:PORT --code CODE. Then coldrise copy --to NAME copies points there, or, after an
/// invitation with --may fetch, copy --from NAME copies points from there. The keys of both sites are exchanged once;
/// afterwards each site accepts only that key.
#[derive(Debug, Args)]
pub(crate) struct LinkArguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show a code with which another site can pair itself once, within 15 minutes.
    Invite {
        /// The name of the other site here.
        #[arg(value_parser = parse_link_name)]
        name: MachineName,
        /// What the other site may do here: send restore points (but not read any), or fetch them (but not add any). A site
        /// that needs both gets two links. A new link of the same kind replaces the old one.
        #[arg(long, value_name = "RIGHT", default_value = "send")]
        may: RightWord,

        /// With --may send: add this prefix to its machines' names here. It sees only machines with this prefix; without
        /// the option, it sees all.
        #[arg(long, value_name = "TEXT", value_parser = parse_prefix)]
        prefix: Option<String>,

        /// With --may fetch: let it fetch only points of these machines, such as web* or db0?. Default: all machines.
        #[arg(long, value_name = "PATTERN", num_args = 1..)]
        machines: Vec<MachinePattern>,
    },
    /// Pair this repository with the site that has shown the code.
    Add {
        /// The name of the other site here.
        #[arg(value_parser = parse_link_name)]
        name: MachineName,
        /// Where its coldrise serve replica listens.
        #[arg(value_name = "HOST:PORT")]
        address: String,
        /// The code.
        #[arg(long, value_name = "CODE")]
        code: String,
    },
    /// Show the links.
    List,
    /// Remove a link. The other site loses its access within a second.
    Remove {
        /// The link.
        #[arg(value_parser = parse_link_name)]
        name: MachineName,
    },
}

/// The word for a right.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum RightWord {
    Send,
    Fetch,
}

impl RightWord {
    fn right(self, prefix: Option<&str>, machines: Vec<MachinePattern>) -> Result<Right> {
        let refused = |option: &str, word: &str| {
            let text = format!("{option} requires --may {word}");
            Err(Error::new(ErrorKind::InvalidInput, text))
        };
        match self {
            // Such as of a variable that is not set.
            RightWord::Send if prefix == Some("") => {
                let text = "--prefix is empty: leave it out to let the other site see all machines";
                Err(Error::new(ErrorKind::InvalidInput, text))
            }
            RightWord::Send if !machines.is_empty() => refused("--machines", "fetch"),
            RightWord::Send => Ok(Right::Send),
            RightWord::Fetch if prefix.is_some() => refused("--prefix", "send"),
            RightWord::Fetch if machines.is_empty() => {
                Ok(Right::Fetch { machines: vec![MachinePattern::all()] })
            }
            RightWord::Fetch => Ok(Right::Fetch { machines }),
        }
    }
}

#[derive(Serialize)]
struct Listed {
    links: Vec<ListedLink>,
}

#[derive(Serialize)]
struct ListedLink {
    name: String,
    /// Where the other site serves; absent if it dials.
    address: Option<String>,
    /// What it may do here when it dials: send or fetch.
    may: Option<&'static str>,
    prefix: String,
    /// The patterns of the machines that it may fetch.
    machines: Vec<String>,
    key: String,
    paired_at_ms: u64,
    /// The time of the newest point that is there.
    last_cut_ms: Option<u64>,
}

pub(crate) fn run(invocation: &Invocation, arguments: LinkArguments) -> Result<Report> {
    let repository = invocation.open()?;
    let links = Links::of(&repository);
    match arguments.action {
        Action::Invite { name, may, prefix, machines } => {
            let right = may.right(prefix.as_deref(), machines)?;
            let prefix = prefix.unwrap_or_default();
            let invitation = links.invite(&name, &prefix, &right, now_ms())?;
            let code = &invitation.code;
            let text = format!(
                "at the other site, within 15 minutes, while coldrise serve replica runs here:\n  \
                 coldrise link add NAME HOST:PORT --code {code}"
            );
            let object =
                json!({ "name": name, "code": code, "valid_until_ms": invitation.until_ms });
            Ok(Report::done(&object, text))
        }
        Action::Add { name, address, code } => {
            if let Ok(link) = links.find(&name) {
                // Reports this before the code is used up.
                links.add(&link)?;
            }
            let code = code.parse::<PairingCode>()?;
            let key = pair_with(&address, &links.identity()?, &code)?;
            let link = Link {
                name: name.clone(),
                key: key.to_string(),
                address: Some(address),
                prefix: String::new(),
                may: Right::default(),
                paired_at_ms: now_ms(),
            };
            let all = links.all()?.into_iter().filter(|other| other.key == link.key);
            let others: Vec<String> = all.map(|other| other.name.to_string()).collect();
            links.add(&link)?;
            let mut text = format!(
                "paired: coldrise copy --to {name} copies restore points there; after an invitation with \
                 --may fetch, copy --from {name} from there"
            );
            if !others.is_empty() {
                text.push_str(&format!(
                    "\nthe site is also linked as {}: there, only the newest invitation of each kind is valid",
                    others.join(", ")
                ));
            }
            Ok(Report::done(&json!({ "name": name, "key": link.key }), text))
        }
        Action::List => Ok(list(&links.all()?, &StatusReader::default().targets(&repository)?)),
        Action::Remove { name } => {
            links.remove(&name)?;
            CopyRecords::of(&repository).forget(&CopyTarget::Link(name.clone()))?;
            let text = format!(
                "removed {name}. Remove the link at the other site, too: coldrise link remove"
            );
            Ok(Report::done(&json!({ "name": name }), text))
        }
    }
}

fn list(all: &[Link], targets: &[TargetCopies]) -> Report {
    let copies = |link: &Link| {
        targets.iter().find(|found| found.is_link && found.target == link.name.as_str())
    };
    let now_ms = now_ms();
    let links: Vec<ListedLink> = all
        .iter()
        .map(|link| ListedLink {
            name: link.name.to_string(),
            address: link.address.clone(),
            may: link.address.is_none().then(|| link.may.word()),
            prefix: link.prefix.clone(),
            machines: link.may.machines().iter().map(|one| one.as_str().to_owned()).collect(),
            key: link.key.clone(),
            paired_at_ms: link.paired_at_ms,
            last_cut_ms: copies(link).and_then(|copies| copies.last_cut_ms),
        })
        .collect();
    let rows: Vec<Vec<String>> = links
        .iter()
        .map(|link| {
            let may = match &link.address {
                Some(_) => String::new(),
                None if !link.machines.is_empty() => format!("fetch {}", link.machines.join(" ")),
                None if link.prefix.is_empty() => "send all machines".to_owned(),
                None => format!("send machines {}…", link.prefix),
            };
            let last_cut = match link.last_cut_ms {
                Some(cut_ms) => age(cut_ms, now_ms),
                None if link.address.is_some() => "no copy".to_owned(),
                None => "-".to_owned(),
            };
            let address = link.address.clone().unwrap_or_else(|| "it dials".to_owned());
            vec![link.name.clone(), address, may, last_cut, link.key[..16].to_owned()]
        })
        .collect();
    let text = match rows.is_empty() {
        true => "no links: coldrise link invite, at the site that others can reach".to_owned(),
        false => table(&["LINK", "ADDRESS", "MAY HERE", ">LAST CUT", "KEY"], &rows),
    };
    Report::done(&Listed { links }, text)
}
