//! `coldrise marks`: lists the time marks of a session.

use std::sync::Arc;

use clap::Args;
use coldrise_block::{Result, now_ms};
use coldrise_inventory::{Followed, MarksDetails, SiteDetails};
use coldrise_requests::session_name;
use coldrise_session::set_mark_rules;
use coldrise_store::{MarkRules, Repository, SessionName};

use crate::invocation::Invocation;
use crate::report::{Report, table};
use crate::units::{show_count, show_moment, show_size};
use coldrise_block::units::show_age;

/// Marks that are listed without --all.
const LISTED: usize = 20;

/// List the times to which a session can go back.
///
/// While a front end serves a session, it marks each second in which clients wrote: the state of
/// all disks at one instant. Marks become fewer with their age: by default each second for 10
/// minutes, each 10 seconds for an hour, each minute for a day (see coldrise publish --marks).
///
/// A mark is used as an address: coldrise publish live/SESSION@20261127T030405Z, or with an age:
/// live/SESSION@-90s. live/SESSION@last-good-20261127T030405Z is the last mark before that time.
/// A mark that is used becomes a restore point; restore and diff remove it at their end.
///
/// Lines above the list: "follows" is the machine that runs elsewhere, and up to when its writes are here; "site" is
/// another site that gets the marks, and up to when it has everything (coldrise protect-live); "held" is the space
/// that only marks need.
#[derive(Debug, Args)]
pub(crate) struct MarksArguments {
    /// The session's name, or live/SESSION.
    #[arg(value_name = "SESSION", value_parser = session_name)]
    session: SessionName,

    /// List all marks, not only the newest 20.
    #[arg(long)]
    all: bool,
}

/// The rule of an option --marks.
///
/// # Errors
/// `InvalidInput`, naming the form.
pub(crate) fn mark_rules(text: Option<&str>) -> Result<Option<MarkRules>> {
    text.map(MarkRules::parse).transpose()
}

/// Changes which marks an existing session keeps, if an option --marks was given.
///
/// # Errors
/// `NotFound`.
pub(crate) fn set_rules(
    repository: &Arc<Repository>,
    session: &SessionName,
    rules: Option<MarkRules>,
) -> Result<()> {
    rules.map_or(Ok(()), |rules| set_mark_rules(repository, session, rules))
}

pub(crate) fn run(invocation: &Invocation, arguments: &MarksArguments) -> Result<Report> {
    let marks = MarksDetails::read(&invocation.open()?, &arguments.session)?;
    let text = text(&marks, arguments.all);
    Ok(Report::answer(&marks, text))
}

fn age_text(age_s: u64) -> String {
    if age_s < 60 { format!("{age_s} s") } else { show_age(age_s) }
}

/// How far the session follows its machine.
fn followed_text(followed: &Followed) -> String {
    let until = match followed.lag_s {
        Some(lag_s) => format!("up to {} ago", age_text(lag_s)),
        None => "nothing yet".to_owned(),
    };
    let mut text = format!("follows    {}: {until}\n", followed.source);
    match &followed.site {
        _ if followed.is_running => {}
        Some(site) => text.push_str(&format!("           site {site} is not connected now\n")),
        None => {
            text.push_str(
                "           no process follows it now: run coldrise protect-live again\n",
            );
        }
    }
    if let Some(problem) = &followed.problem {
        text.push_str(&format!("           the last round failed: {problem}\n"));
    }
    text
}

/// How far another site has the marks.
fn site_text(site: &SiteDetails) -> String {
    let until = match site.lag_s {
        Some(lag_s) => format!("up to {} ago", age_text(lag_s)),
        None if site.is_running => "its first point is being copied".to_owned(),
        None => "nothing yet".to_owned(),
    };
    let there = site.session.as_ref().map_or(String::new(), |there| format!(" as live/{there}"));
    let mut text = format!("site       {}{there}: {until}", site.link);
    if site.pending_bytes > 0 {
        text.push_str(&format!(", {} on the way", show_size(site.pending_bytes)));
    }
    text.push('\n');
    if !site.is_running {
        text.push_str("           no process sends now: run coldrise protect-live --to again\n");
    }
    if let Some(problem) = &site.problem {
        text.push_str(&format!("           {problem}\n"));
    }
    text
}

fn text(marks: &MarksDetails, all: bool) -> String {
    let session = &marks.session;
    let mut text = format!("session    {session}\nrule       {}\n", marks.rule);
    if let Some(followed) = &marks.follows {
        text.push_str(&followed_text(followed));
    }
    marks.sites.iter().for_each(|site| text.push_str(&site_text(site)));
    if let (Some(held), Some(limit)) = (marks.held_bytes, marks.held_bytes_limit) {
        text.push_str(&format!("held       {} of at most {}\n", show_size(held), show_size(limit)));
    }
    if let Some(rule) = &marks.reduced_rule {
        text.push_str(&format!("kept now   {rule}: there is not enough space for the rule\n"));
    }
    for stretch in &marks.stretches {
        let step = match stretch.finest_step_s {
            0 => String::new(),
            step => format!(", at best each {step} s"),
        };
        text.push_str(&format!(
            "reachable  {} to {}: {}{step}\n",
            show_moment(stretch.from_ms),
            show_moment(stretch.to_ms),
            show_count(stretch.marks, "mark"),
        ));
    }
    if marks.marks.is_empty() {
        text.push_str(match marks.follows {
            Some(_) => "no marks: no round has ended, or there was no space for them\n",
            None if marks.rule == "off" => {
                "no marks: the rule of the session is off; boot and recover take --marks RULE\n"
            }
            None => {
                "no marks: they are made while a front end serves the session and clients write\n"
            }
        });
        return text;
    }
    let first = if all { 0 } else { marks.marks.len().saturating_sub(LISTED) };
    let now_ms = now_ms();
    let rows: Vec<Vec<String>> = marks.marks[first..]
        .iter()
        .map(|mark| {
            let age = age_text(now_ms.saturating_sub(mark.marked_at_ms) / 1000);
            let state = if mark.is_consistent { "consistent" } else { "" };
            vec![mark.address.clone(), age, state.to_owned()]
        })
        .collect();
    text.push('\n');
    text.push_str(&table(&["ADDRESS", ">AGE", ""], &rows));
    if first > 0 {
        text.push_str(&format!("\n{first} older ones: coldrise marks {session} --all"));
    }
    text.push_str(&format!("\n\ngo back  coldrise publish live/{session}@-90s --name NAME"));
    text
}
