//! What the agent does when it is asked: each request in terms of the store.
//!
//! Invariant: whoever has not heard an answer may ask again, the same agent or the next, and gets what the first
//! answer was, or one that is as good.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use waystation_format::slot::{Header, Key, State, Tenant, Version, Writer};
use waystation_format::{Error, Kind, Result};

use super::cluster::Cluster;
use super::log;
use super::metrics::Metrics;
use crate::local::message::{
    AdoptionReport, HexId, Reply, Request, SlotReport, Status, Ticket, Wanted, Wish,
};
use crate::store::{Adoption, Found, Store};

/// How long a process waits at a time for a version that is brought.
const BRING_TIME: Duration = Duration::from_secs(5);

/// What is asked, and what to answer from.
#[derive(Debug)]
pub(super) struct Answers {
    store: Arc<Store>,
    adoption: AdoptionReport,
    /// None if the agent is alone.
    cluster: Option<Cluster>,
    metrics: Metrics,
    verifications: Verifications,
}

/// The verifications of an agent that is alone: one at a time, numbered from 1.
#[derive(Debug, Default)]
struct Verifications {
    begun: AtomicU64,
    /// The number of the last that succeeded; locked while one runs.
    succeeded: Mutex<u64>,
}

/// How an agent found its store, counted.
pub fn report(adoption: &Adoption) -> AdoptionReport {
    let mut report = AdoptionReport { is_new: adoption.is_new, ..AdoptionReport::default() };
    for found in &adoption.slots {
        match found {
            Found::Free => report.free += 1,
            Found::Whole => report.whole += 1,
            Found::InWriting => report.in_writing += 1,
            Found::Abandoned => report.abandoned += 1,
            Found::Quarantined => report.quarantined += 1,
            Found::Gone => report.gone += 1,
            Found::Damaged(error) => report.damaged.push(error.to_string()),
        }
    }
    report
}

impl Answers {
    pub fn new(store: Arc<Store>, adoption: AdoptionReport, cluster: Option<Cluster>) -> Self {
        let metrics = Metrics::new(Arc::clone(&store), adoption.damaged.len());
        Self { store, adoption, cluster, metrics, verifications: Verifications::default() }
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Does what a process asks for; `is_there` says whether it still waits for the answer.
    pub fn answer(
        &self,
        process: &Writer,
        process_count: usize,
        request: Request,
        is_there: &dyn Fn() -> bool,
    ) -> Result<Reply> {
        match request {
            Request::Hello(_) => {
                Err(Error::new(Kind::InvalidInput, "a connection has one greeting, at its beginning"))
            }
            Request::Status {} => Ok(Reply::Status(self.status(process_count))),
            Request::Metrics {} => Ok(Reply::Metrics(self.metrics(process_count))),
            Request::Inventory {} => {
                Ok(Reply::Inventory(self.store.inventory().iter().map(SlotReport::from).collect()))
            }
            Request::Grant(wanted) => self.grant(process, wanted, is_there).map(Reply::Granted),
            Request::Seal(ticket) => {
                self.seal_for_all(process, ticket).map(|digest| Reply::Sealed { digest })
            }
            Request::Abandon(ticket) => self.abandon(process, ticket).map(|()| Reply::Done {}),
            Request::Find(wish) => self.find(wish).map(|slot| Reply::Found { slot }),
            Request::DiscardQuarantined { slot } => self.discard_quarantined(slot).map(|()| Reply::Done {}),
            Request::Standing {} => self.several().map(|cluster| Reply::Standing(cluster.standing())),
            Request::Begin(beginning) => {
                let cluster = self.several()?;
                cluster.begin(beginning).map(|()| Reply::Standing(cluster.standing()))
            }
            Request::Bring(wish) => self.bring(wish),
            Request::Verify {} => self.verify().map(|()| Reply::Done {}),
            request => self.decide(request),
        }
    }

    /// What trainers decide where there is nobody else to.
    fn decide(&self, request: Request) -> Result<Reply> {
        if self.cluster.is_some() {
            let message = "agents of several hosts decide together what is committed and what goes; trainers ask how things stand";
            return Err(Error::new(Kind::Unsupported, message));
        }
        match request {
            Request::Commit(at) => self.store.commit(at.into()).map(Reply::Slots),
            Request::GiveUp(at) => self.store.give_up(at.into()).map(Reply::Slots),
            Request::RetireBefore(at) => self.store.retire_before(at.into()).map(Reply::Slots),
            Request::Quarantine(at) => self.quarantine(at.into()).map(Reply::Slots),
            Request::RaiseEpoch { epoch } => self.raise_epoch(epoch).map(Reply::Epoch),
            _ => Err(Error::new(Kind::Internal, "a request has no answer; please report this")),
        }
    }

    fn several(&self) -> Result<&Cluster> {
        self.cluster.as_ref().ok_or_else(alone)
    }

    /// The numbers of this agent, for those who watch.
    pub fn metrics(&self, process_count: usize) -> String {
        let watched = self.cluster.as_ref().map(Cluster::watched);
        let host = self.cluster.as_ref().map_or_else(String::new, Cluster::host);
        self.metrics.text(process_count, &host, watched.as_ref())
    }

    pub fn status(&self, process_count: usize) -> Status {
        let record = self.store.record();
        Status {
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            process: std::process::id(),
            process_count: u32::try_from(process_count).unwrap_or(u32::MAX),
            directory: self.store.path().display().to_string(),
            run: HexId(record.run),
            topology: HexId(record.topology),
            store: HexId(record.store),
            epoch: record.epoch,
            slot_bytes: record.slot_bytes,
            slot_count: record.slot_count,
            versions_per_shard: record.versions_per_shard,
            host: self.cluster.as_ref().map_or_else(String::new, Cluster::host),
            agent_count: self.cluster.as_ref().map_or(1, |cluster| cluster.agent_count() as u32),
            adoption: self.adoption.clone(),
        }
    }

    fn grant(&self, process: &Writer, wanted: Wanted, is_there: &dyn Fn() -> bool) -> Result<Ticket> {
        let version = Version { epoch: wanted.epoch, step: wanted.step };
        if let Some(cluster) = &self.cluster {
            cluster.await_room(&wanted.shard, version, is_there)?;
        }
        let tenant = Tenant {
            key: Key { run: self.store.record().run, shard: wanted.shard, version },
            contents_bytes: wanted.contents_bytes,
            data_bytes: wanted.data_bytes,
            writer: *process,
        };
        // The slots of the dead are there to be had, also of those whose death nobody has told.
        self.store.reap()?;
        // A process that asks for what it has been given has not heard of it, or has lost it: it begins anew. It has
        // not heard of an older version either if it gave up waiting, as where this agent was stopped.
        for header in self.store.inventory() {
            if is_superseded(&header, process, &tenant.key) {
                self.store.abort(header.slot, header.sequence)?;
            }
        }
        let grant = self.store.begin(&tenant)?;
        Ok(Ticket { slot: grant.slot, ticket: grant.ticket })
    }

    /// Seals a slot, and has the agents of all hosts take note of it.
    fn seal_for_all(&self, process: &Writer, ticket: Ticket) -> Result<u64> {
        let Some(cluster) = &self.cluster else { return self.seal(process, ticket) };
        if let State::Writing(tenant) = self.header(ticket.slot)?.state {
            cluster.check(&tenant.key.shard, tenant.key.version)?;
        }
        let digest = self.seal(process, ticket)?;
        let header = self.header(ticket.slot)?;
        if let Some(Tenant { key, .. }) = header.state.tenant() {
            cluster.sealed(&header, &key.shard, key.version, digest)?;
        }
        Ok(digest)
    }

    /// Verifies all slots, and lets go of what is damaged.
    fn verify(&self) -> Result<()> {
        if let Some(cluster) = &self.cluster {
            cluster.verify();
            return Ok(());
        }
        // All processes of a program ask at once. Two verifications at a time would read what the other one frees, and
        // one that began after this request does for it as well.
        let asked = self.verifications.begun.load(Ordering::SeqCst);
        let mut succeeded = self.verifications.succeeded.lock().unwrap_or_else(PoisonError::into_inner);
        if *succeeded > asked {
            return Ok(());
        }
        let number = self.verifications.begun.fetch_add(1, Ordering::SeqCst) + 1;
        self.verify_alone()?;
        *succeeded = number;
        Ok(())
    }

    fn verify_alone(&self) -> Result<()> {
        let found = self.store.verify_all()?;
        for (slot, error) in found.mended {
            log::error("mended", &error.with("slot", slot.to_string()));
        }
        for (header, error) in found.damaged {
            log::error("damaged", &error.with("slot", header.slot.to_string()));
            if self.store.quarantine(&header)? {
                self.store.discard_quarantined(header.slot)?;
            }
        }
        Ok(())
    }

    fn bring(&self, wish: Wish) -> Result<Reply> {
        let cluster = self.several()?;
        let version = Version { epoch: wish.epoch, step: wish.step };
        let key = Key { run: self.store.record().run, shard: wish.shard.clone(), version };
        match self.find(wish.clone()) {
            Err(error) if error.kind() == Kind::NotFound => {}
            found => return found.map(|slot| Reply::Found { slot }),
        }
        if !cluster.bring(&key, BRING_TIME)? {
            return Ok(Reply::Coming {});
        }
        // Its slot may have been needed at once.
        Ok(self.find(wish).map_or(Reply::Coming {}, |slot| Reply::Found { slot }))
    }

    fn seal(&self, process: &Writer, Ticket { slot, ticket }: Ticket) -> Result<u64> {
        match self.header(slot)?.state {
            State::Writing(tenant) if tenant.writer != *process => {
                return Err(Error::new(Kind::Fenced, "the slot is that of another process")
                    .with("slot", slot.to_string())
                    .with("process", tenant.writer.process.to_string()));
            }
            State::Writing(tenant) => self.check_epoch(&tenant)?,
            _ => {}
        }
        match self.store.seal(slot, ticket) {
            Ok(sums) => Ok(sums.digest),
            Err(error) if error.kind() == Kind::Fenced => {
                let header = self.header(slot)?;
                let is_theirs = header.state.tenant().is_some_and(|tenant| tenant.writer == *process);
                match (&header.state, header.state.sums()) {
                    // It is the version that was sealed with this ticket: the answer was lost.
                    (State::Sealed(..), Some(sums)) if is_theirs && since(&header, ticket) == Some(1) => {
                        Ok(sums.digest)
                    }
                    (State::Committed(..), Some(sums)) if is_theirs && since(&header, ticket) == Some(2) => {
                        Ok(sums.digest)
                    }
                    _ => Err(error),
                }
            }
            Err(error) => {
                log::error("not_sealed", &error);
                Err(error)
            }
        }
    }

    fn check_epoch(&self, tenant: &Tenant) -> Result<()> {
        let (epoch, current) = (tenant.key.version.epoch, self.store.record().epoch);
        if epoch >= current {
            return Ok(());
        }
        let message = format!(
            "another program has begun with this agent, and this one's steps are not kept any more (its epoch {epoch} \
             is over, the epoch is {current} now); end one of the two"
        );
        Err(Error::new(Kind::Fenced, message).with("shard", &*tenant.key.shard))
    }

    fn abandon(&self, process: &Writer, Ticket { slot, ticket }: Ticket) -> Result<()> {
        let header = self.header(slot)?;
        match &header.state {
            State::Writing(tenant) if tenant.writer == *process && header.sequence == ticket => {
                self.store.abort(slot, ticket)
            }
            _ => Ok(()), // it has been taken from them already
        }
    }

    fn find(&self, wish: Wish) -> Result<u32> {
        let version = Version { epoch: wish.epoch, step: wish.step };
        let is_meant = |header: &&Header| {
            header.state.sums().is_some()
                && header
                    .state
                    .tenant()
                    .is_some_and(|tenant| tenant.key.shard == wish.shard && tenant.key.version == version)
        };
        self.store.inventory().iter().find(is_meant).map(|header| header.slot).ok_or_else(|| {
            Error::new(Kind::NotFound, "this version of the shard is not in the store, or not sealed yet")
                .with("shard", &*wish.shard)
                .with("epoch", version.epoch.to_string())
                .with("step", version.step.to_string())
        })
    }

    fn quarantine(&self, version: Version) -> Result<Vec<u32>> {
        let is_meant = |header: &&Header| {
            !matches!(header.state, State::Quarantined(_))
                && header.state.tenant().is_some_and(|tenant| tenant.key.version == version)
        };
        let mut slots = Vec::new();
        for header in self.store.inventory().iter().filter(is_meant) {
            if self.store.quarantine(header)? {
                slots.push(header.slot);
            }
        }
        if !slots.is_empty() {
            let told = [("epoch", version.epoch), ("step", version.step)]
                .map(|(key, value)| (key, value.to_string()));
            log::line("quarantined", &told);
        }
        Ok(slots)
    }

    fn discard_quarantined(&self, slot: u32) -> Result<()> {
        match self.header(slot)?.state {
            State::Free => Ok(()), // done before
            _ => self.store.discard_quarantined(slot),
        }
    }

    fn raise_epoch(&self, epoch: u64) -> Result<u64> {
        self.store.raise_epoch(epoch)?;
        let current = self.store.record().epoch;
        for header in self.store.inventory() {
            match &header.state {
                State::Writing(tenant) if tenant.key.version.epoch < current => {
                    // Its writer may live and write on: nobody else is given the bytes as long as it can.
                    match self.store.abort(header.slot, header.sequence) {
                        // Sealed or taken back meanwhile, or read: it is refused when it is to be sealed.
                        Err(error) if [Kind::Fenced, Kind::Unavailable].contains(&error.kind()) => {}
                        other => other?,
                    }
                }
                _ => {}
            }
        }
        log::line("epoch", &[("epoch", current.to_string())]);
        Ok(current)
    }

    fn header(&self, slot: u32) -> Result<Header> {
        let found = self.store.inventory().into_iter().find(|header| header.slot == slot);
        found.ok_or_else(|| {
            Error::new(Kind::NotFound, "the store has no such slot").with("slot", slot.to_string())
        })
    }
}

fn alone() -> Error {
    let message =
        "the agent keeps this host's state alone; start it with --listen to have several hosts keep it";
    Error::new(Kind::Unsupported, message)
}

/// How often a header has changed since it was given away with a ticket.
fn since(header: &Header, ticket: u64) -> Option<u64> {
    header.sequence.checked_sub(ticket)
}

/// Whether a process that asks for a slot for a version has been given this one for it, or for an older one.
fn is_superseded(header: &Header, process: &Writer, wanted: &Key) -> bool {
    let State::Writing(Tenant { key, writer, .. }) = &header.state else { return false };
    writer == process && key.shard == wanted.shard && key.version <= wanted.version
}
