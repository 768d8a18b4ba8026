// Stands in for the CUDA kernels in a build without CUDA, and in a build with it for an operator that has no .cu file yet:
// each throws by name. The build defines FENWICK_CUDA_<OP> for every kernels/cuda/<op>.cu that it compiles.
#include "kernels/causal_conv1d.h"
#include "kernels/cross_entropy.h"
#include "kernels/decode.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/gated_delta_rule.h"
#include "kernels/gates.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/rope.h"
#include "kernels/softmax_attention.h"
#include "kernels/ssd.h"
#include "kernels/swiglu.h"

#define FENWICK_CUDA_STUB(name, Args)                                                                      \
    void name(const Exec&, const Args&) {                                                                  \
        fail("[" #name                                                                                     \
             "] this program was built without CUDA code for it; set device: cpu, or build with the CUDA " \
             "Toolkit (cmake --preset cuda)");                                                             \
    }

namespace fenwick::kernels::cuda {

#ifndef FENWICK_CUDA_CAUSAL_CONV1D
FENWICK_CUDA_STUB(causal_conv1d_forward, CausalConv1d)
FENWICK_CUDA_STUB(causal_conv1d_backward, CausalConv1dBackward)
#endif
#ifndef FENWICK_CUDA_CROSS_ENTROPY
FENWICK_CUDA_STUB(cross_entropy, CrossEntropy)
FENWICK_CUDA_STUB(sum, Sum)
#endif
#ifndef FENWICK_CUDA_DECODE_ATTENTION
FENWICK_CUDA_STUB(decode_attention, DecodeAttention)
#endif
#ifndef FENWICK_CUDA_DECODE_PROJECTION
FENWICK_CUDA_STUB(decode_projection, DecodeProjection)
#endif
#ifndef FENWICK_CUDA_DECODE_SCAN
FENWICK_CUDA_STUB(decode_ssd, DecodeSsd)
FENWICK_CUDA_STUB(decode_gated_delta_rule, DecodeGatedDeltaRule)
#endif
#ifndef FENWICK_CUDA_DECODE_TOKEN
FENWICK_CUDA_STUB(decode_token_pack, DecodeTokenMatrix)
FENWICK_CUDA_STUB(decode_token_block, DecodeTokenStates)
FENWICK_CUDA_STUB(decode_token, DecodeToken)
DecodeTokenLayout decode_token_layout(const Exec&, const DecodeTokenShape&) { return {}; }
DecodeTokenSteps decode_token_steps(const Exec&, const DecodeTokenLayout&, const std::vector<DecodeOperator>&, float*) {
    return {};
}
#endif
#ifndef FENWICK_CUDA_ELEMENTWISE
FENWICK_CUDA_STUB(axpby, Axpby)
FENWICK_CUDA_STUB(add, Add)
FENWICK_CUDA_STUB(fill, Fill)
FENWICK_CUDA_STUB(scale_by, ScaleBy)
FENWICK_CUDA_STUB(scale_heads_forward, ScaleHeads)
FENWICK_CUDA_STUB(scale_heads_backward, ScaleHeadsBackward)
FENWICK_CUDA_STUB(head_skip_forward, HeadSkip)
FENWICK_CUDA_STUB(head_skip_backward, HeadSkipBackward)
#endif
#ifndef FENWICK_CUDA_EMBEDDING
FENWICK_CUDA_STUB(embedding_forward, Embedding)
FENWICK_CUDA_STUB(embedding_backward, EmbeddingBackward)
#endif
#ifndef FENWICK_CUDA_GATED_DELTA_RULE
FENWICK_CUDA_STUB(gated_delta_rule_forward, GatedDeltaRule)
FENWICK_CUDA_STUB(gated_delta_rule_backward, GatedDeltaRuleBackward)
FENWICK_CUDA_STUB(gated_delta_rule_recurrent, GatedDeltaRuleRecurrent)
#endif
#ifndef FENWICK_CUDA_GATES
FENWICK_CUDA_STUB(decay_gate_forward, DecayGate)
FENWICK_CUDA_STUB(decay_gate_backward, DecayGateBackward)
FENWICK_CUDA_STUB(level_scales_forward, LevelScales)
FENWICK_CUDA_STUB(level_scales_backward, LevelScalesBackward)
FENWICK_CUDA_STUB(sigmoid_forward, Sigmoid)
FENWICK_CUDA_STUB(sigmoid_backward, SigmoidBackward)
#endif
#ifndef FENWICK_CUDA_GEMM
FENWICK_CUDA_STUB(gemm, Gemm)
#endif
#ifndef FENWICK_CUDA_NORM
FENWICK_CUDA_STUB(rms_norm_forward, RmsNorm)
FENWICK_CUDA_STUB(rms_norm_backward, RmsNormBackward)
FENWICK_CUDA_STUB(l2norm_forward, L2Norm)
FENWICK_CUDA_STUB(l2norm_backward, L2NormBackward)
#endif
#ifndef FENWICK_CUDA_OPTIMIZER
FENWICK_CUDA_STUB(adamw, AdamW)
FENWICK_CUDA_STUB(sum_squares, SumSquares)
#endif
#ifndef FENWICK_CUDA_ROPE
FENWICK_CUDA_STUB(rope, Rope)
#endif
#ifndef FENWICK_CUDA_SAMPLING
FENWICK_CUDA_STUB(sample, Sample)
#endif
#ifndef FENWICK_CUDA_SOFTMAX_ATTENTION
FENWICK_CUDA_STUB(softmax_attention_forward, SoftmaxAttention)
FENWICK_CUDA_STUB(softmax_attention_backward, SoftmaxAttentionBackward)
FENWICK_CUDA_STUB(softmax_attention_cached, SoftmaxAttentionCached)
#endif
#ifndef FENWICK_CUDA_SSD
FENWICK_CUDA_STUB(ssd_forward, Ssd)
FENWICK_CUDA_STUB(ssd_backward, SsdBackward)
FENWICK_CUDA_STUB(ssd_recurrent, SsdRecurrent)
#endif
#ifndef FENWICK_CUDA_SWIGLU
FENWICK_CUDA_STUB(swiglu_forward, Swiglu)
FENWICK_CUDA_STUB(swiglu_backward, SwigluBackward)
#endif

}  // namespace fenwick::kernels::cuda
