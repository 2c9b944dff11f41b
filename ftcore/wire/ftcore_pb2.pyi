from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Want(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTHING: _ClassVar[Want]
    SEAT: _ClassVar[Want]
    LEAVE: _ClassVar[Want]
    GONE: _ClassVar[Want]
NOTHING: Want
SEAT: Want
LEAVE: Want
GONE: Want

class Member(_message.Message):
    __slots__ = ("replica_id", "incarnation", "store_address", "heal_addresses")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEAL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    incarnation: int
    store_address: str
    heal_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replica_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., store_address: _Optional[str] = ..., heal_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Quorum(_message.Message):
    __slots__ = ("quorum_id", "from_step", "members", "healing", "spares", "sources")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    HEALING_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    from_step: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    healing: _containers.RepeatedScalarFieldContainer[str]
    spares: _containers.RepeatedScalarFieldContainer[str]
    sources: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, quorum_id: _Optional[int] = ..., from_step: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., healing: _Optional[_Iterable[str]] = ..., spares: _Optional[_Iterable[str]] = ..., sources: _Optional[_Iterable[str]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("number", "quorum_id", "left_id", "committed", "is_torn", "lineage", "promised", "limit", "failed_id", "want", "reason", "group_s", "heal_s", "held_s", "heal_bytes_done", "heal_bytes_total", "slowness")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    LEFT_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    IS_TORN_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    FAILED_ID_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GROUP_S_FIELD_NUMBER: _ClassVar[int]
    HEAL_S_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    HEAL_BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    HEAL_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    number: int
    quorum_id: int
    left_id: int
    committed: int
    is_torn: bool
    lineage: int
    promised: int
    limit: int
    failed_id: int
    want: Want
    reason: str
    group_s: float
    heal_s: float
    held_s: float
    heal_bytes_done: int
    heal_bytes_total: int
    slowness: float
    def __init__(self, number: _Optional[int] = ..., quorum_id: _Optional[int] = ..., left_id: _Optional[int] = ..., committed: _Optional[int] = ..., is_torn: bool = ..., lineage: _Optional[int] = ..., promised: _Optional[int] = ..., limit: _Optional[int] = ..., failed_id: _Optional[int] = ..., want: _Optional[_Union[Want, str]] = ..., reason: _Optional[str] = ..., group_s: _Optional[float] = ..., heal_s: _Optional[float] = ..., held_s: _Optional[float] = ..., heal_bytes_done: _Optional[int] = ..., heal_bytes_total: _Optional[int] = ..., slowness: _Optional[float] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("job", "member", "report", "settings", "standing")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    job: str
    member: Member
    report: Report
    settings: _containers.ScalarMap[str, str]
    standing: Quorum
    def __init__(self, job: _Optional[str] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., settings: _Optional[_Mapping[str, str]] = ..., standing: _Optional[_Union[Quorum, _Mapping]] = ...) -> None: ...

class FromGroup(_message.Message):
    __slots__ = ("hello", "report")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    report: Report
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("report_every_s",)
    REPORT_EVERY_S_FIELD_NUMBER: _ClassVar[int]
    report_every_s: float
    def __init__(self, report_every_s: _Optional[float] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("change_id", "is_broken", "must_abort")
    CHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    IS_BROKEN_FIELD_NUMBER: _ClassVar[int]
    MUST_ABORT_FIELD_NUMBER: _ClassVar[int]
    change_id: int
    is_broken: bool
    must_abort: bool
    def __init__(self, change_id: _Optional[int] = ..., is_broken: bool = ..., must_abort: bool = ...) -> None: ...

class LostMember(_message.Message):
    __slots__ = ("quorum_id", "replica_id", "incarnation", "reason", "others")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    replica_id: str
    incarnation: int
    reason: str
    others: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, quorum_id: _Optional[int] = ..., replica_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ..., others: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("what", "remedy", "compare_with")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    COMPARE_WITH_FIELD_NUMBER: _ClassVar[int]
    what: str
    remedy: str
    compare_with: str
    def __init__(self, what: _Optional[str] = ..., remedy: _Optional[str] = ..., compare_with: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ToGroup(_message.Message):
    __slots__ = ("attached", "prepare", "new_quorum", "lost_member", "drain", "refused", "notice")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    NEW_QUORUM_FIELD_NUMBER: _ClassVar[int]
    LOST_MEMBER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    prepare: Prepare
    new_quorum: Quorum
    lost_member: LostMember
    drain: Drain
    refused: Refused
    notice: Notice
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., new_quorum: _Optional[_Union[Quorum, _Mapping]] = ..., lost_member: _Optional[_Union[LostMember, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("rank", "pid", "machine", "is_push", "store_address", "heal_address", "committed", "lineage", "settings", "token", "unfit")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    IS_PUSH_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEAL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    machine: str
    is_push: bool
    store_address: str
    heal_address: str
    committed: int
    lineage: int
    settings: _containers.ScalarMap[str, str]
    token: str
    unfit: str
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., machine: _Optional[str] = ..., is_push: bool = ..., store_address: _Optional[str] = ..., heal_address: _Optional[str] = ..., committed: _Optional[int] = ..., lineage: _Optional[int] = ..., settings: _Optional[_Mapping[str, str]] = ..., token: _Optional[str] = ..., unfit: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("until",)
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    until: int
    def __init__(self, until: _Optional[int] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("step", "is_ok", "reason", "until", "is_torn", "group_s", "heal_s", "held_s", "must_stop", "slowness", "must_recompute")
    STEP_FIELD_NUMBER: _ClassVar[int]
    IS_OK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    IS_TORN_FIELD_NUMBER: _ClassVar[int]
    GROUP_S_FIELD_NUMBER: _ClassVar[int]
    HEAL_S_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    MUST_STOP_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    MUST_RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    step: int
    is_ok: bool
    reason: str
    until: int
    is_torn: bool
    group_s: float
    heal_s: float
    held_s: float
    must_stop: bool
    slowness: float
    must_recompute: bool
    def __init__(self, step: _Optional[int] = ..., is_ok: bool = ..., reason: _Optional[str] = ..., until: _Optional[int] = ..., is_torn: bool = ..., group_s: _Optional[float] = ..., heal_s: _Optional[float] = ..., held_s: _Optional[float] = ..., must_stop: bool = ..., slowness: _Optional[float] = ..., must_recompute: bool = ...) -> None: ...

class HealProgress(_message.Message):
    __slots__ = ("bytes_done", "bytes_total")
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    bytes_done: int
    bytes_total: int
    def __init__(self, bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...

class Healed(_message.Message):
    __slots__ = ("lineage",)
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    def __init__(self, lineage: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class FromRank(_message.Message):
    __slots__ = ("hello", "ready", "vote", "healed", "leave", "bye", "heal_progress")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    HEALED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    HEAL_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    ready: Ready
    vote: Vote
    healed: Healed
    leave: Leave
    bye: Bye
    heal_progress: HealProgress
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., healed: _Optional[_Union[Healed, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., heal_progress: _Optional[_Union[HealProgress, _Mapping]] = ...) -> None: ...

class Go(_message.Message):
    __slots__ = ("step", "quorum", "must_heal", "may_run")
    STEP_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    MUST_HEAL_FIELD_NUMBER: _ClassVar[int]
    MAY_RUN_FIELD_NUMBER: _ClassVar[int]
    step: int
    quorum: Quorum
    must_heal: bool
    may_run: int
    def __init__(self, step: _Optional[int] = ..., quorum: _Optional[_Union[Quorum, _Mapping]] = ..., must_heal: bool = ..., may_run: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("is_committed", "reason", "go", "step", "must_recompute", "may_run")
    IS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MUST_RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    MAY_RUN_FIELD_NUMBER: _ClassVar[int]
    is_committed: bool
    reason: str
    go: Go
    step: int
    must_recompute: bool
    may_run: int
    def __init__(self, is_committed: bool = ..., reason: _Optional[str] = ..., go: _Optional[_Union[Go, _Mapping]] = ..., step: _Optional[int] = ..., must_recompute: bool = ..., may_run: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("quorum_id", "reason")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    reason: str
    def __init__(self, quorum_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("what", "remedy", "is_clean", "compare_with")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    IS_CLEAN_FIELD_NUMBER: _ClassVar[int]
    COMPARE_WITH_FIELD_NUMBER: _ClassVar[int]
    what: str
    remedy: str
    is_clean: bool
    compare_with: str
    def __init__(self, what: _Optional[str] = ..., remedy: _Optional[str] = ..., is_clean: bool = ..., compare_with: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: int
    def __init__(self, ranks: _Optional[int] = ...) -> None: ...

class ToRank(_message.Message):
    __slots__ = ("welcome", "go", "decision", "abort", "stop", "notice")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    GO_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    go: Go
    decision: Decision
    abort: Abort
    stop: Stop
    notice: Notice
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., go: _Optional[_Union[Go, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ...) -> None: ...
