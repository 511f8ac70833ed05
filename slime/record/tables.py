"""The tables of `record.db`.

    rollouts   one row per rollout and per evaluation: time, weight version, number of samples, mean reward
    groups     one row per prompt group: the prompt, its label, the outcome of the group and its reason
    samples    one row per response: text, reward and its parts, and the token-level numbers
    advantages one row per response: the advantage that the trainer computed
    histograms how ratios and entropies of a step's trained tokens are distributed
    images     small copies of the images that samples show
    pieces     the text of every token id that occurred
    spans      named time spans by lane: the loop, engines, rewards, trainer ranks, weight syncs
    actions    the requests of users, and the replies of the run
    ledger     one row per event of a group, a sample or a step, in the order they happened; never changed
    ledger_finished, ledger_episodes, ledger_rollouts
               whole samples, unfinished episodes and batches that no checkpoint covers yet; a killed run
               resumes with them

When the file reaches its limit, the oldest rollouts lose their groups and samples; their own rows stay.
`forget_groups` removes what refers to a removed row. SQLite could do that too, but would then look up the
group of every sample that is written.
"""

import sqlite3

SCHEMA_NUMBER = 6
TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rollouts (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,             -- train or eval
    rollout_id INTEGER NOT NULL,
    time REAL NOT NULL,             -- seconds since 1970, when it ended
    version TEXT,                   -- weights that the engines held when it started
    num_groups INTEGER NOT NULL,
    num_samples INTEGER NOT NULL,
    mean_reward REAL,
    pruned INTEGER NOT NULL DEFAULT 0,
    checksum INTEGER,               -- of its samples, NULL: none was computed
    UNIQUE (kind, rollout_id)
);
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY,
    rollout INTEGER NOT NULL REFERENCES rollouts ON DELETE CASCADE,
    dataset TEXT,                   -- of an evaluation
    group_index INTEGER,
    prompt TEXT NOT NULL,
    prompt_hash INTEGER NOT NULL,
    label TEXT,
    outcome TEXT NOT NULL,          -- trained, filtered, failed or evaluated
    reason TEXT,
    spread REAL                     -- highest minus lowest reward, NULL: fewer than two
);
CREATE TABLE IF NOT EXISTS samples (
    id INTEGER PRIMARY KEY,
    group_row INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE,
    sample_index INTEGER,
    execution INTEGER,              -- siblings of one fan-out share it
    status TEXT NOT NULL,
    reward REAL,
    reward_parts TEXT,              -- JSON, where the reward is more than a number
    failure TEXT,                   -- why there is no reward
    response TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,    -- of the response
    numbers BLOB                    -- slime.record.samples.encode_numbers
);
CREATE TABLE IF NOT EXISTS advantages (
    sample INTEGER PRIMARY KEY REFERENCES samples ON DELETE CASCADE,
    value REAL NOT NULL,            -- mean over the trained tokens
    tokens BLOB                     -- float32, one per response token, NULL: all are `value`
);
CREATE TABLE IF NOT EXISTS histograms (
    rollout_id INTEGER NOT NULL,
    name TEXT NOT NULL,             -- slime.record.additions.BINS
    counts TEXT NOT NULL,           -- JSON
    PRIMARY KEY (rollout_id, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS images (
    group_row INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE,
    member INTEGER NOT NULL,        -- number of the first sample of the group that shows it
    place INTEGER NOT NULL,         -- among the images of that sample
    data BLOB NOT NULL,             -- slime.record.images
    PRIMARY KEY (group_row, member, place)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pieces (token INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spans (
    id INTEGER PRIMARY KEY,
    rollout_id INTEGER NOT NULL,    -- the step it belongs to
    lane TEXT NOT NULL,             -- loop, engines, reward, trainer-0, ...
    name TEXT NOT NULL,
    start REAL NOT NULL,            -- seconds since 1970
    end REAL NOT NULL,
    about TEXT                      -- JSON
);
CREATE TABLE IF NOT EXISTS actions (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,             -- when it was requested
    name TEXT NOT NULL,             -- a row of slime.catalog.actions
    value REAL,                     -- text for actions of engines: an address
    who TEXT NOT NULL,              -- page, command line, ...
    state TEXT NOT NULL,            -- asked, done or refused
    answered REAL,
    rollout_id INTEGER,             -- the step after which the run responded
    answer TEXT
);
CREATE TABLE IF NOT EXISTS ledger (
    id INTEGER PRIMARY KEY,         -- the order of events, because clocks may go backwards
    time REAL NOT NULL,
    start INTEGER NOT NULL,         -- which start of the run wrote it
    event TEXT NOT NULL,            -- slime.record.ledger_rows.Event
    rollout INTEGER NOT NULL,       -- that was being made, or that the event is about
    group_index INTEGER,
    sample_index INTEGER,
    attempt INTEGER,
    value TEXT                      -- reason, status, or numbers as JSON
);
CREATE TABLE IF NOT EXISTS ledger_finished (
    id INTEGER PRIMARY KEY,
    group_index INTEGER,
    settings TEXT NOT NULL,         -- digest of the settings that the sample was made with
    sample_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    started INTEGER NOT NULL,       -- response tokens that it had when generation started
    version INTEGER,                -- newest weights that it was generated with
    payload BLOB NOT NULL           -- slime.utils.codec
);
CREATE TABLE IF NOT EXISTS ledger_episodes (
    sample_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    started INTEGER NOT NULL,       -- as in ledger_finished
    group_index INTEGER,
    settings TEXT NOT NULL,
    version INTEGER,
    payload BLOB NOT NULL,          -- the sample as its last recorded turn left it
    PRIMARY KEY (sample_index, attempt, started)
);
CREATE TABLE IF NOT EXISTS ledger_rollouts (
    rollout_id INTEGER PRIMARY KEY,
    settings TEXT NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS groups_of_rollout ON groups (rollout);
CREATE INDEX IF NOT EXISTS groups_of_prompt ON groups (prompt_hash);
CREATE INDEX IF NOT EXISTS groups_by_spread ON groups (spread);
CREATE INDEX IF NOT EXISTS samples_of_group ON samples (group_row);
CREATE INDEX IF NOT EXISTS samples_by_reward ON samples (reward);
CREATE INDEX IF NOT EXISTS samples_by_length ON samples (num_tokens);
CREATE INDEX IF NOT EXISTS spans_of_rollout ON spans (rollout_id);
CREATE INDEX IF NOT EXISTS ledger_finished_of_group ON ledger_finished (group_index);
"""


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables that the file does not have yet."""
    for statement in TABLES.split(";")[:-1]:
        connection.execute(statement)
