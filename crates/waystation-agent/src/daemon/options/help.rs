//! What `waystation-agent --help` says.

/// What the program is for, and what it takes.
pub const HELP: &str = "\
Keeps versions of a program's state in the memory of this host. They outlive the program and the agent.

usage: waystation-agent run --directory DIRECTORY --run-id ID --slots N --data-bytes BYTES
                            --memory-cap-bytes BYTES [OPTION...]
       waystation-agent discard --directory DIRECTORY [--allow-disk]

run: serves the processes of this host until SIGTERM, which keeps every slot. Prints one line of JSON when it is
ready, and logs events to stderr. Adopts the store of an earlier agent in the directory.
  --directory DIRECTORY     a directory on tmpfs that only this user can access (0700); created if its parent exists
  --run-id ID               the run whose versions it keeps, 32 hex digits
  --topology ID             the topology for which the slots were counted, 32 hex digits; by default zeros
  --slots N                 number of slots: --versions plus one for every shard that this host keeps
  --data-bytes BYTES        bytes of arrays that a slot holds
  --contents-bytes BYTES    maximum size of a table of contents; by default 1MiB
  --slot-bytes BYTES        size of the file of a slot, instead of the two options above
  --versions N              committed versions to keep of each shard while the next one is written; at least 1,
                            by default 2
  --memory-cap-bytes BYTES  maximum memory of the store; the agent refuses to start if the slots need more
  --threads N               threads that verify slots; by default 4, or the number of cores if that is lower
  --metrics HOST:PORT       serves metrics for Prometheus at this address, under /metrics, to any client
  --allow-disk              permits a directory on a disk

The following options make the agent one of several, whose hosts keep copies of each other's shards. The first four
are required together. All agents have the same --run-id, --hosts and --copies:
  --listen HOST:PORT        address at which it listens for the other agents
  --host NAME               name of this host
  --hosts FILE              all hosts: a JSON list of objects of name, address (host and port) and domain. Hosts that
                            may fail together have the same domain; by default each host is its own. The agent reads
                            the file again when it changes, so a host can be replaced at another address
  --secret-file FILE        secret that only the agents know, at least 16 random bytes; readable only by this user
  --tls-certificate FILE    certificate of this host, named as in --host, for servers and clients (PEM); proves that
                            this is that host
  --tls-key FILE            private key of the certificate; readable only by this user
  --tls-authorities FILE    authorities that sign the certificates of all hosts
  --copies N                number of copies of each shard; by default 2
  --link-bytes-per-s BYTES  bandwidth of the link to the other hosts; by default unlimited
  --link-share SHARE        share of that bandwidth that copies may use, up to 1; by default 1
  --dead-after-s SECONDS    silence after which an agent counts as dead; by default 3
  --give-up-s SECONDS       time after which the agents give up a version that lacks copies; by default 60

discard: removes the store in the directory. Refused while an agent or a process uses it.

BYTES are a number, or a number with KiB, MiB, GiB or TiB.
";
