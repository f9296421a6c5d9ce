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
    papers=("Wang et al. 2022, DeepNet: Scaling Transformers to 1,000 Layers, arXiv 2203.00555",),
    note="The carry of a decoder-only model; DeepNet also shrinks the initial weights by (8·T)^(1/4).",
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

NAMED: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        NONE, POST, PRE, MIX, PERI, NGPT, NGPT_LERP, SQRT_SCALING, LN_SCALING,
        QK, QKV, PRE_QKV, RES_POST, DEEPNORM, HYBRID, HYBRID_STAR,
    )
}  # fmt: skip
