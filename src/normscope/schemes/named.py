"""The named schemes. A new one is a few lines here; nothing else in the package knows their names."""

from normscope.schemes.scheme import Scheme, Slots

_VASWANI = "Vaswani et al. 2017, Attention Is All You Need, arXiv 1706.03762"
_XIONG = "Xiong et al. 2020, On Layer Normalization in the Transformer Architecture, arXiv 2002.04745"
_MENARY = (
    "Menary, Kaski, Freitas 2024, Transformer Normalisation Layers and the Independence of Semantic Subspaces, arXiv 2406.17837"
)
_KARAGODIN = "Karagodin, Ge, Polyanskiy, Rigollet 2025, Normalization in Attention Dynamics, arXiv 2510.22026"
_NGPT = "Loshchilov et al. 2024, nGPT: Representation Learning on the Hypersphere, arXiv 2410.01131"
_HENRY = "Henry et al. 2020, Query-Key Normalization for Transformers, arXiv 2010.04245"
_DEEPNET = "Wang et al. 2022, DeepNet: Scaling Transformers to 1,000 Layers, arXiv 2203.00555"
_ZHUO = "Zhuo et al. 2025, HybridNorm, arXiv 2503.04598"

NONE = Scheme(
    "none",
    Slots(),
    title="No-Norm",
    users="a baseline",
    papers=(_MENARY,),
)
POST = Scheme(
    "post",
    Slots(stream="norm"),
    title="Post-LN",
    users="the original Transformer, BERT",
    papers=(_VASWANI, _KARAGODIN),
)
PRE = Scheme(
    "pre",
    Slots(input="norm"),
    title="Pre-LN",
    users="GPT-2, Llama, Mistral, Qwen2",
    papers=(_XIONG, _KARAGODIN),
)
MIX = Scheme(
    "mix",
    POST.attention,
    until=0.25,
    then=PRE,
    title="Mix-LN",
    users="Li et al. 2024",
    papers=("Li, Yin, Liu 2024, Mix-LN, arXiv 2412.13795", _KARAGODIN),
)
PERI = Scheme(
    "peri",
    Slots(input="norm", output="norm"),
    title="Peri-LN",
    users="Gemma 2; Gemma 3 adds qk",
    papers=("Kim et al. 2025, Peri-LN, arXiv 2502.02732", _KARAGODIN),
)
NGPT = Scheme(
    "ngpt",
    Slots(output="norm", step="alpha", stream="norm"),
    title="nGPT, as analysed",
    users="theory of nGPT",
    papers=(_NGPT, _KARAGODIN),
)
NGPT_LERP = Scheme(
    "ngpt-lerp",
    Slots(heads="qk", output="norm", step="alpha", carry="1 - alpha", stream="norm"),
    alpha=0.05,
    weights="normalised",
    title="nGPT, as trained",
    users="NVIDIA nGPT",
    papers=(_NGPT,),
)
SQRT_SCALING = Scheme(
    "sqrt-scaling",
    Slots(step="1/sqrt(layer)", stream="norm"),
    title="sqrt-scaling",
    users="theory",
    papers=(_KARAGODIN,),
    note="The first version of its paper calls it LN-Scaling; ln-scaling is what people train under that name.",
)
LN_SCALING = Scheme(
    "ln-scaling",
    Slots(input="norm/sqrt(layer)"),
    title="LayerNorm Scaling",
    users="Sun et al. 2025",
    papers=("Sun et al. 2025, The Curse of Depth in Large Language Models, arXiv 2502.05795",),
)
QK = Scheme(
    "qk",
    Slots(input="norm", heads="qk"),
    feedforward=PRE.feedforward,
    title="QK-Norm on Pre-LN",
    users="ViT-22B, Qwen3",
    papers=(
        _HENRY,
        "Dehghani et al. 2023, Scaling Vision Transformers to 22 Billion Parameters, arXiv 2302.05442",
    ),
)
QKV = Scheme(
    "qkv",
    Slots(heads="qkv"),
    feedforward=PRE.feedforward,
    title="QKV-Norm",
    users="Menary et al. 2024",
    papers=(_MENARY,),
)
PRE_QKV = Scheme(
    "pre-qkv",
    Slots(input="norm", heads="qkv"),
    feedforward=PRE.feedforward,
    title="QKV-Norm on Pre-LN",
    note="Gemma 4 as released also normalises what each sublayer writes: in slots it is peri+qkv.",
    users="Gemma 4 (see the note)",
)
RES_POST = Scheme(
    "res-post",
    Slots(output="norm"),
    title="Res-Post-Norm",
    users="Swin v2; OLMo 2 adds qk",
    papers=(
        "Liu et al. 2021, Swin Transformer V2, arXiv 2111.09883",
        "OLMo Team 2024, 2 OLMo 2 Furious, arXiv 2501.00656",
    ),
)
DEEPNORM = Scheme(
    "deepnorm",
    Slots(carry="(2*depth)**(1/4)", stream="norm"),
    title="DeepNorm",
    users="DeepNet",
    papers=(_DEEPNET,),
    initial="(8*depth)**(-1/4)",
    note="Carry and initial weights of a decoder-only model.",
)
HYBRID = Scheme(
    "hybrid",
    Slots(heads="qkv", stream="norm"),
    feedforward=NONE.feedforward,
    title="HybridNorm",
    users="HybridNorm (Zhuo et al. 2025)",
    papers=(_ZHUO,),
    note="The norm after attention is the paper's Post-Norm of the feed-forward layer: n = Norm(x), then x = n + F(n).",
)
HYBRID_STAR = Scheme(
    "hybrid-star",
    PRE_QKV.attention,
    feedforward=PRE_QKV.feedforward,
    until="1/depth",
    then=HYBRID,
    title="HybridNorm*",
    users="HybridNorm* (Zhuo et al. 2025)",
    papers=(_ZHUO,),
    note="The first block is pre-qkv.",
)
KEEL = Scheme(
    "keel",
    Slots(input="norm", carry="2*depth", stream="norm"),
    title="KEEL",
    users="Chen and Wei 2026",
    papers=("Chen, Wei 2026, Post-LayerNorm Is Back: Stable, ExpressivE, and Deep, arXiv 2601.19895",),
    note="The carry is the number of sublayers.",
)
MINIMAX = Scheme(
    "minimax",
    Slots(carry="(2*depth)**(1/4)", stream="norm"),
    title="MiniMax-01",
    users="MiniMax-Text-01",
    papers=("MiniMax 2025, MiniMax-01: Scaling Foundation Models with Lightning Attention, arXiv 2501.08313", _DEEPNET),
    note="Its code normalises at the start of a sublayer: n = Norm(x), x = α·n + f(n). That is one norm of the stream, "
    "counted with the sublayer before.",
)
DEPTH_SCALED = Scheme(
    "depth-scaled",
    Slots(input="norm", step="1/sqrt(depth)"),
    title="Pre-LN, updates times 1/√T",
    users="depth-μP; MiniCPM with a factor",
    papers=("Yang, Yu, Zhu, Hayou 2023, Feature Learning in Infinite-Depth Neural Networks, arXiv 2310.02244",),
)
DEPTH_SCALED_LINEAR = Scheme(
    "depth-scaled-linear",
    Slots(input="norm", step="1/depth"),
    title="Pre-LN, updates times 1/T",
    users="CompleteP",
    papers=("Dey et al. 2025, Don't be lazy: CompleteP enables compute-efficient deep transformers, arXiv 2505.01618",),
)
LAYERSCALE = Scheme(
    "layerscale",
    Slots(input="norm", step="alpha"),
    alpha=1e-4,
    title="LayerScale",
    users="CaiT, DINOv2, BEiT, InternVL",
    papers=("Touvron et al. 2021, Going deeper with Image Transformers, arXiv 2103.17239",),
)
REZERO = Scheme(
    "rezero",
    Slots(step="alpha"),
    alpha=0,
    learned="scalar",
    title="ReZero",
    users="Bachlechner et al. 2020",
    papers=("Bachlechner et al. 2020, ReZero is All You Need: Fast Convergence at Large Depth, arXiv 2003.04887",),
)
DYT = Scheme(
    "dyt",
    PRE.attention,
    norm="tanh",
    title="Dynamic Tanh on Pre-LN",
    users="Zhu et al. 2025",
    papers=("Zhu et al. 2025, Transformers without Normalization, arXiv 2503.10622",),
)
DERF = Scheme(
    "derf",
    PRE.attention,
    norm="erf",
    title="Dynamic erf on Pre-LN",
    users="Chen et al. 2025",
    papers=("Chen et al. 2025, Stronger Normalization-Free Transformers, arXiv 2512.10938",),
)
SUB_LN = Scheme(
    "sub-ln",
    Slots(input="norm", inner="norm"),
    initial="sqrt(log(2*depth))",
    title="Sub-LN",
    users="Magneto, BitNet",
    papers=("Wang et al. 2022, Foundation Transformers, arXiv 2210.06423",),
    note="Initial weights of a decoder-only model.",
)
GATED = Scheme(
    "gated",
    Slots(input="norm", gate="sigmoid"),
    title="Gated attention on Pre-LN",
    users="Qwen3-Next adds qk",
    papers=("Qiu et al. 2025, Gated Attention for Large Language Models, arXiv 2505.06708",),
)
SINK = Scheme(
    "sink",
    Slots(input="norm", scores="sink"),
    title="Learned sinks on Pre-LN",
    users="gpt-oss",
    papers=("OpenAI 2025, gpt-oss-120b & gpt-oss-20b Model Card, arXiv 2508.10925",),
)
SOFTCAP = Scheme(
    "softcap",
    Slots(input="norm", scores="softcap(50)"),
    title="Soft-capped logits on Pre-LN",
    users="Gemma 2 (with peri)",
    papers=("Gemma Team 2024, Gemma 2: Improving Open Language Models at a Practical Size, arXiv 2408.00118",),
)
TANGENT = Scheme(
    "tangent",
    Slots(input="norm", output="tangent"),
    title="Orthogonal updates on Pre-LN",
    users="Oh et al. 2025",
    papers=(
        "Oh et al. 2025, Revisiting Residual Connections: Orthogonal Updates for Stable and Efficient Deep Networks, "
        "arXiv 2505.11881",
    ),
)

NAMED: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        NONE, POST, PRE, MIX, PERI, NGPT, NGPT_LERP, SQRT_SCALING, LN_SCALING,
        QK, QKV, PRE_QKV, RES_POST, DEEPNORM, HYBRID, HYBRID_STAR,
        KEEL, MINIMAX, DEPTH_SCALED, DEPTH_SCALED_LINEAR, LAYERSCALE, REZERO, DYT, DERF, SUB_LN, GATED, SINK, SOFTCAP, TANGENT,
    )
}  # fmt: skip
