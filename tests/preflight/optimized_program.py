"""An optimised program of XLA's, as text, whose kernels are counted by hand."""

PROGRAM = """\
HloModule step, is_scheduled=true

%fused_add (param_0: f16[8,4], param_1: f32[64,4]) -> f32[8,4] {
  %param_0 = f16[8,4]{1,0} parameter(0)
  %param_1 = f32[64,4]{1,0} parameter(1)
  %slice.1 = f32[8,4]{1,0} slice(%param_1), slice={[0:8], [0:4]}
  %convert.1 = f32[8,4]{1,0} convert(%param_0)
  ROOT %add.1 = f32[8,4]{1,0} add(%convert.1, %slice.1)
}

%fused_update (param_0: f32[64,4], param_1: f32[2,4], param_2: s32[]) -> f32[64,4] {
  %param_0 = f32[64,4]{1,0} parameter(0)
  %param_1 = f32[2,4]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = f32[64,4]{1,0} dynamic-update-slice(%param_0, %param_1, %param_2)
}

%fused_dot (param_0: bf16[32,16], param_1: bf16[16,8]) -> bf16[32,8] {
  %param_0 = bf16[32,16]{1,0} parameter(0)
  %param_1 = bf16[16,8]{1,0} parameter(1)
  ROOT %dot.1 = bf16[32,8]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[16])) -> (s32[], f32[16]) {
  %state = (s32[], f32[16]{0}) parameter(0)
  %get-tuple-element.5 = f32[16]{0} get-tuple-element(%state), index=1
  ROOT %negate.1 = f32[16]{0} negate(%get-tuple-element.5)
}

%condition (state.1: (s32[], f32[16])) -> pred[] {
  %state.1 = (s32[], f32[16]{0}) parameter(0)
  ROOT %constant.9 = pred[] constant(true)
}

%command_buffer (p.1: f32[64,4]) -> f32[64,4] {
  %p.1 = f32[64,4]{1,0} parameter(0)
  ROOT %copy.1 = f32[64,4]{1,0} copy(%p.1)
}

ENTRY %step (images: f16[2,8,8,4], weights: f16[6,3,3,2], table: f32[64,4], rows: f32[2,4]) -> f32[8,4] {
  %images = f16[2,8,8,4]{3,2,1,0} parameter(0)
  %weights = f16[6,3,3,2]{3,2,1,0} parameter(1)
  %table = f32[64,4]{1,0} parameter(2)
  %rows = f32[2,4]{1,0} parameter(3)
  %half = f16[8,4]{1,0} parameter(4)
  %place = s32[] parameter(5)
  %left = bf16[32,16]{1,0} parameter(6)
  %right = bf16[16,8]{1,0} parameter(7)
  %loop = (s32[], f32[16]{0}) parameter(8)
  %cudnn-conv.1 = (f16[2,6,6,6]{3,2,1,0}, u8[512]{0}) custom-call(%images, %weights), window={size=3x3}, dim_labels=b01f_o01i->b01f, feature_group_count=2, custom_call_target="__cudnn$convForward", metadata={op_name="net.1/conv1.12/aten__convolution"}
  %loop_add_fusion = f32[8,4]{1,0} fusion(%half, %table), kind=kLoop, calls=%fused_add
  %update = f32[64,4]{1,0} fusion(%table, %rows, %place), kind=kLoop, calls=%fused_update
  %gemm_fusion = bf16[32,8]{1,0} fusion(%left, %right), kind=kCustom, calls=%fused_dot, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %all-reduce-start = f32[2,4]{1,0} all-reduce-start(%rows), to_apply=%sum
  %while.1 = (s32[], f32[16]{0}) while(%loop), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %cudnn-conv.2 = (f16[6,3,3,2]{3,2,1,0}, u8[0]{0}) custom-call(%images, %images), window={size=3x3}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter", metadata={op_name="backward.net.conv1.90/aten__convolution_backward"}
  %all-reduce-done = f32[2,4]{1,0} all-reduce-done(%all-reduce-start)
  %all-reduce.7 = f32[2,4]{1,0} all-reduce(%all-reduce-done), to_apply=%sum
  %call.1 = f32[64,4]{1,0} call(%table), to_apply=%command_buffer
  ROOT %transpose.1 = f32[4,8]{1,0} transpose(%loop_add_fusion), dimensions={1,0}
}
"""  # noqa: E501
